"""Kinds of emissions of an HMM."""

from hmmlm.emissions.base import Emission
from hmmlm.emissions.blocked import Blocked
from hmmlm.emissions.categorical import Categorical
from hmmlm.emissions.union import UnionEmission

KINDS: dict[str, type[Emission]] = {each.kind: each for each in (Categorical, Blocked)}
"""The kinds by the name that model files use."""

__all__ = ["KINDS", "Blocked", "Categorical", "Emission", "UnionEmission"]
