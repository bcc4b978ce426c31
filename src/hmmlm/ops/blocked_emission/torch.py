"""Only the cells inside blocks, as batched products over tiles of words that share a block.

Block widths are very uneven (1 to 561 words of PTB): padding every block to the widest would do seven times the work.
Tiles of a few words waste almost nothing, and the normaliser is summed in two stages, over a tile and over the tiles
of a block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.errors import InputError

TILE = 32  # words a tile


class Tiles(NamedTuple):
    """Words laid out in tiles of one block each, [N, TILE]."""

    word: Tensor  # [N * TILE] the word in each slot; 0 where empty
    empty: Tensor  # [N, TILE] bool
    block: Tensor  # [N] block of each tile
    slot_of_word: Tensor  # [V]
    tiles_of_block: Tensor  # [M, most tiles a block] tile numbers; N where there are fewer
    block_of_word: Tensor  # [V]

    def to(self, device: torch.device | str) -> "Tiles":
        return Tiles(*(field.to(device) for field in self))


def make_tiles(block_of_word: Tensor, num_blocks: int) -> Tiles:
    """Lay the words out; done once for a structure."""
    block_of_word = block_of_word.cpu()
    widths = torch.bincount(block_of_word, minlength=num_blocks)
    if int(widths.min()) == 0:
        raise InputError(f"block {int(widths.argmin())} has no word: every block must emit something")
    tiles = -(-widths // TILE)
    first = torch.cumsum(tiles, 0) - tiles
    order = torch.argsort(block_of_word, stable=True)
    within = torch.arange(len(order)) - (torch.cumsum(widths, 0) - widths)[block_of_word[order]]
    slot = first[block_of_word[order]] * TILE + within
    total = int(tiles.sum())
    word, empty = torch.zeros(total * TILE, dtype=torch.long), torch.ones(total * TILE, dtype=torch.bool)
    word[slot], empty[slot] = order, False
    slot_of_word = torch.empty_like(order)
    slot_of_word[order] = slot
    number = torch.arange(int(tiles.max()))
    tiles_of_block = torch.where(number < tiles[:, None], first[:, None] + number, total)
    block = torch.repeat_interleave(torch.arange(num_blocks), tiles)
    return Tiles(word, empty.view(total, TILE), block, slot_of_word, tiles_of_block, block_of_word)


def blocked_emission(hidden: Tensor, words: Tensor, bias: Tensor | None, tiles: Tiles) -> Tensor:
    """hidden [M, k, h], words [V, h], bias [V] → log p(word | state i of its block) [V, k], in float32 or better.

    The products are not done in low precision: they are small, and a rounded score is a wrong probability.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        hidden, words = hidden.to(dtype), words.to(dtype)
        count, size = tiles.empty.shape
        rows = words.index_select(0, tiles.word).view(count, size, -1)
        states = hidden.index_select(0, tiles.block)  # [N, k, h]
        scores = rows @ states.transpose(1, 2)  # [N, TILE, k]
        if bias is not None:
            scores = scores + bias.to(dtype).index_select(0, tiles.word).view(count, size, 1)
        scores = scores.masked_fill(tiles.empty[..., None], float("-inf"))
        partial = torch.cat([scores.logsumexp(1), scores.new_full((1, scores.shape[2]), float("-inf"))])
        normalizer = partial.index_select(0, tiles.tiles_of_block.flatten()).view(*tiles.tiles_of_block.shape, -1)
        normalizer = normalizer.logsumexp(1)  # [M, k]
        by_word = scores.reshape(count * size, -1).index_select(0, tiles.slot_of_word)
        return by_word - normalizer.index_select(0, tiles.block_of_word)
