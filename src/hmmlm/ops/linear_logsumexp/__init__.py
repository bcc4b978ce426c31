"""logsumexp of a linear layer: the normaliser of softmax(U Wᵀ + b) in O(N) memory.

`impl`: "naive" holds all N × M scores, "torch" chunks of rows, "triton" (CUDA) none at all (chunks in the backward
pass for rows over 512 bytes); "auto" picks the fastest that fits.
"""

from hmmlm.ops.linear_logsumexp.function import Impl, linear_logsumexp

__all__ = ["Impl", "linear_logsumexp"]
