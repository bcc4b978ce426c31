"""Kinds of transitions of an HMM."""

from hmmlm.transitions.base import Transition
from hmmlm.transitions.block_diagonal import BlockDiagonal
from hmmlm.transitions.dense import Dense
from hmmlm.transitions.factored import Factored

KINDS: dict[str, type[Transition]] = {each.kind: each for each in (Dense, Factored)}
"""The kinds by the name that model files use."""

__all__ = ["KINDS", "BlockDiagonal", "Dense", "Factored", "Transition"]
