"""Blocked HMM with a factored transition: log-likelihood, its gradient and the carry.

`impl`: "naive" computes in log space, one word at a time; "scaled" uses scaled probabilities and batched products;
"triton" (CUDA) uses one kernel for the tiles, one per direction of the recursion, and sums over blocks in a fixed
order. "auto" selects the fastest that supports the problem.
"""

from hmmlm.ops.blocked_scan.api import blocked_scan
from hmmlm.ops.blocked_scan.problem import Factors
from hmmlm.ops.blocked_scan.softmax import Features, softmax_scan

__all__ = ["Factors", "Features", "blocked_scan", "softmax_scan"]
