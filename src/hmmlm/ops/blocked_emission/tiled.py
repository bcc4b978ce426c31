"""Portable implementation: batched products over tiles of words, sums over each tile, then over the tiles of a block.

The tiles of a block are contiguous, so sums over them are segment sums: in a fixed order, and without several threads
adding to the same location.
"""

import torch
from torch import Tensor

from hmmlm.ops.blocked_emission.tiles import Tiles
from hmmlm.ops.common import matmul


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
