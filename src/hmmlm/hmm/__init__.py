"""The hidden Markov model and its exact queries."""

from hmmlm.hmm.hmm import HMM
from hmmlm.hmm.results import Counts, Filtered
from hmmlm.ops.common import Carry, Scan

__all__ = ["HMM", "Carry", "Counts", "Filtered", "Scan"]
