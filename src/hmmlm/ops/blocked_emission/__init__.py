"""Block-diagonal emissions: log p(word | state) for the words of each state's block and no others.

`impl`: "naive" makes the whole state × word matrix and masks it; "torch" multiplies tiles of words with the states of
their block; "triton" (CUDA) does the same in one kernel forward and two backward, without copies of the states and
without scores in memory. "auto" picks the fastest that fits.
"""

from hmmlm.ops.blocked_emission.function import Impl, blocked_emission
from hmmlm.ops.blocked_emission.tiles import Tiles, make_tiles

__all__ = ["Impl", "Tiles", "blocked_emission", "make_tiles"]
