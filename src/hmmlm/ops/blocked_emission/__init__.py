"""Block-diagonal emissions: log p(word | state) for the words of each state's block only.

`impl`: "naive" computes the whole state × word matrix and masks it; "tiled" multiplies tiles of words by the states of
their block; "triton" (CUDA) does the same in one forward and two backward kernels, without copying the states or
storing scores. "auto" selects the fastest that supports the problem.
"""

from hmmlm.ops.blocked_emission.api import EmissionImpl, blocked_emission
from hmmlm.ops.blocked_emission.tiles import Tiles, make_tiles

__all__ = ["EmissionImpl", "Tiles", "blocked_emission", "make_tiles"]
