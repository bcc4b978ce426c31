"""logsumexp of a linear layer: the normalizer of softmax(U Wᵀ + b) in O(N) memory.

`impl`: "naive" materializes all N × M scores, "chunked" some rows at a time, "triton" (CUDA) none (chunks in the
backward pass for rows over 512 bytes); "auto" selects the fastest that supports the problem.
"""

from hmmlm.ops.linear_logsumexp.api import LinearImpl, linear_logsumexp

__all__ = ["LinearImpl", "linear_logsumexp"]
