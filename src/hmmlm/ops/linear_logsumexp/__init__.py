"""logsumexp of a linear layer: the normalizer of softmax(U Wᵀ + b) in O(N) memory.

On a CPU, scores are computed in tiles. The Triton kernels store none (some rows at a time in the backward pass for rows
over 512 bytes).
"""

from hmmlm.ops.linear_logsumexp.api import linear_logsumexp

__all__ = ["linear_logsumexp"]
