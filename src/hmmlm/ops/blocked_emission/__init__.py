"""Block-diagonal emissions: log p(word | state) for the words of each state's block only.

Tiles of words are multiplied by the states of their block. The Triton kernels do so without copying the states or
storing scores.
"""

from hmmlm.ops.blocked_emission.api import blocked_emission
from hmmlm.ops.blocked_emission.tiles import Tiles, make_tiles

__all__ = ["Tiles", "blocked_emission", "make_tiles"]
