"""Hidden Markov models and their exact queries."""

from hmmlm.hmm.blocked import BlockedHMM
from hmmlm.hmm.dense import HMM
from hmmlm.hmm.protocol import Carry, Counts, Filtered, Scan
from hmmlm.hmm.queries import HiddenMarkovModel
from hmmlm.hmm.union import COMPONENTS, UnionHMM

KINDS: dict[str, type[HiddenMarkovModel]] = {**COMPONENTS, "union": UnionHMM}
"""Kinds of HMMs by the name that model files use."""

__all__ = ["HMM", "KINDS", "BlockedHMM", "Carry", "Counts", "Filtered", "HiddenMarkovModel", "Scan", "UnionHMM"]
