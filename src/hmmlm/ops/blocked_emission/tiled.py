"""Portable implementation: batched products over tiles of words, sums over each tile, then over the tiles of a block.

Block widths are very uneven (1 to 561 words on PTB): padding every block to the widest would do seven times the work.
Tiles of TILE words, each from one block, waste little. The tiles of a block are contiguous, so sums over them are
segment sums: in a fixed order, and without several threads adding to the same location.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.ops.common import matmul

TILE = 64  # words per tile: a row of a tensor core's output, and few copies of a block's states


class Tiles(NamedTuple):
    """Words arranged in N tiles of one block each; the tiles of a block are contiguous."""

    word: Tensor  # [N * TILE] word in each slot; 0 where empty
    empty: Tensor  # [N, TILE] bool
    block: Tensor  # [N] block of each tile
    first: Tensor  # [M + 1] first tile of each block, then N
    slot_of_word: Tensor  # [V]
    block_of_word: Tensor  # [V]

    def to(self, device: torch.device | str) -> "Tiles":
        """Return the tiles on `device`."""
        return Tiles(*(field.to(device) for field in self))


def make_tiles(block_of_word: Tensor, num_blocks: int) -> Tiles:
    """Arrange the words in tiles; needed once per block structure."""
    block_of_word = block_of_word.cpu()
    widths = torch.bincount(block_of_word, minlength=num_blocks)
    if int(widths.min()) == 0:
        raise InputError(f"block {int(widths.argmin())} has no word: assign at least one word to every block")
    tiles = -(-widths // TILE)
    first = torch.cat([torch.zeros(1, dtype=torch.long), torch.cumsum(tiles, 0)])
    order = torch.argsort(block_of_word, stable=True)
    within = torch.arange(len(order)) - (torch.cumsum(widths, 0) - widths)[block_of_word[order]]
    slot = first[block_of_word[order]] * TILE + within
    total = int(first[-1])
    word, empty = torch.zeros(total * TILE, dtype=torch.long), torch.ones(total * TILE, dtype=torch.bool)
    word[slot], empty[slot] = order, False
    slot_of_word = torch.empty_like(order)
    slot_of_word[order] = slot
    block = torch.repeat_interleave(torch.arange(num_blocks), tiles)
    return Tiles(word, empty.view(total, TILE), block, first, slot_of_word, block_of_word)


def forward(hidden: Tensor, words: Tensor, bias: Tensor | None, tiles: Tiles) -> Tensor:
    """Compute the log-probabilities [V, k] in the wide dtype."""
    count, size = tiles.empty.shape
    states = hidden.index_select(0, tiles.block)  # [N, k, h]
    scores = matmul(_slots(words, tiles), states.transpose(1, 2))  # [N, TILE, k]
    if bias is not None:
        scores += bias.index_select(0, tiles.word).view(count, size, 1)
    scores.masked_fill_(tiles.empty[..., None], -torch.inf)
    largest = _over_blocks(scores.amax(1), "max", tiles)  # [M, k]
    shifted = scores - largest.index_select(0, tiles.block)[:, None]
    normalizer = _over_blocks(shifted.exp().sum(1), "sum", tiles).log()
    by_word = shifted.view(count * size, -1).index_select(0, tiles.slot_of_word)
    return by_word - normalizer.index_select(0, tiles.block_of_word)


def backward(grad: Tensor, hidden: Tensor, words: Tensor, out: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of hidden, words and bias in the wide dtype."""
    empty = tiles.empty[..., None]
    total = _over_blocks(_slots(grad, tiles).masked_fill(empty, 0.0).sum(1), "sum", tiles)  # [M, k]
    grad_scores = grad - out.exp() * total.index_select(0, tiles.block_of_word)  # [V, k]
    in_tiles = _slots(grad_scores.to(hidden.dtype), tiles).masked_fill(empty, 0.0)
    states = hidden.index_select(0, tiles.block)
    grad_hidden = _over_blocks(matmul(in_tiles.transpose(1, 2), _slots(words, tiles)), "sum", tiles)
    grad_words = matmul(in_tiles, states).flatten(0, 1).index_select(0, tiles.slot_of_word)
    return grad_hidden, grad_words, grad_scores.sum(1)


def _slots(by_word: Tensor, tiles: Tiles) -> Tensor:
    """Arrange [V, n] in tiles [N, TILE, n]; the contents of empty slots are arbitrary."""
    return by_word.index_select(0, tiles.word).view(*tiles.empty.shape, -1)


def _over_blocks(by_tile: Tensor, reduce: str, tiles: Tiles) -> Tensor:
    """Reduce [N, ...] over the tiles of each block to [M, ...]."""
    # unsafe: the offsets are valid by construction, and checking them would synchronize with the device
    return torch.segment_reduce(by_tile, reduce, offsets=tiles.first, axis=0, unsafe=True)
