"""The probabilistic objects and the questions that can be asked of them, exactly."""

from hmmlm.hmm.blocked import BlockedHMM, Carry
from hmmlm.hmm.dense import HMM
from hmmlm.ops.results import Counts, Filtered

AnyHMM = HMM | BlockedHMM

__all__ = ["HMM", "AnyHMM", "BlockedHMM", "Carry", "Counts", "Filtered"]
