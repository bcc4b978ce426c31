"""Block-diagonal emissions: log p(word | state) for the words of each state's block and no others.

`naive` makes the whole state × word matrix and masks it; `torch` touches only the cells inside blocks.
"""

# This file must not import the library torch: the name belongs to the module torch.py beside it.
from hmmlm.ops.blocked_emission.naive import blocked_emission as naive_blocked_emission
from hmmlm.ops.blocked_emission.torch import Tiles, blocked_emission, make_tiles

__all__ = ["Tiles", "blocked_emission", "make_tiles", "naive_blocked_emission"]
