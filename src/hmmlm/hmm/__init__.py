"""Hidden Markov models and their exact queries."""

from torch import Tensor

from hmmlm.hmm.blocked import BlockedHMM
from hmmlm.hmm.dense import HMM
from hmmlm.hmm.protocol import Carry, Counts, Filtered, Scan
from hmmlm.hmm.queries import HiddenMarkovModel

KINDS: dict[str, type[HMM] | type[BlockedHMM]] = {"dense": HMM, "blocked": BlockedHMM}
"""Kinds of HMMs by the name that model files use."""


def hmm_from_tensors(kind: str, tensors: dict[str, Tensor]) -> HiddenMarkovModel:
    """Return the HMM of a kind from the tensors of a model file."""
    return KINDS[kind](**{name: tensors[name] for name in KINDS[kind].TENSORS})  # type: ignore[arg-type]


__all__ = ["HMM", "KINDS", "BlockedHMM", "Carry", "Counts", "Filtered", "HiddenMarkovModel", "Scan", "hmm_from_tensors"]
