"""The hidden Markov model and its exact queries."""

from hmmlm.hmm.hmm import HMM
from hmmlm.ops.common import Carry, Scan
from hmmlm.scan.results import Counts, Filtered

__all__ = ["HMM", "Carry", "Counts", "Filtered", "Scan"]
