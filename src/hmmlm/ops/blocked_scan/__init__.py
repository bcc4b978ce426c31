"""Exact inference in a blocked HMM whose transition is factored: likelihood and final state, with gradients.

`impl`: "naive" is log space, a word at a time; "torch" scaled probabilities in batched products; "triton" (CUDA) one
kernel for the tiles, one for each direction of the recursion, and sums over blocks in a fixed order. "auto" picks the
fastest that fits.
"""

from hmmlm.ops.blocked_scan.function import Impl, blocked_scan
from hmmlm.ops.blocked_scan.problem import BlockedScan, Initial

__all__ = ["BlockedScan", "Impl", "Initial", "blocked_scan"]
