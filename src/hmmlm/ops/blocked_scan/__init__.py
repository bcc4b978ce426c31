"""Blocked HMM with a factored transition, on a GPU: log-likelihood, its gradient and the carry.

One kernel for the tiles, one per direction of the recursion, and sums over blocks in a fixed order.
"""

from hmmlm.ops.blocked_scan.api import blocked_scan, refusal
from hmmlm.ops.blocked_scan.problem import Factors

__all__ = ["Factors", "blocked_scan", "refusal"]
