"""Kinds of transitions of an HMM."""

from hmmlm.transitions.base import Transition
from hmmlm.transitions.block_diagonal import BlockDiagonal
from hmmlm.transitions.dense import Dense
from hmmlm.transitions.factored import Factored
from hmmlm.transitions.low_rank import LowRank
from hmmlm.transitions.monarch import Monarch

KINDS: dict[str, type[Transition]] = {each.kind: each for each in (Dense, Factored, LowRank, Monarch)}
"""The kinds by the name that model files use."""

__all__ = ["KINDS", "BlockDiagonal", "Dense", "Factored", "LowRank", "Monarch", "Transition"]
