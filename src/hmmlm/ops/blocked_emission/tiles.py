"""Layout of words for batched products.

Block widths are very uneven (1 to 561 words on PTB): padding every block to the widest would do seven times the work.
Tiles of TILE words, each from one block, waste little.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.errors import InputError

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
