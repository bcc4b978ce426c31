"""Specification: the whole score matrix at once."""

from torch import Tensor

from hmmlm.ops.common import logsumexp


def linear_logsumexp(u: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Compute log Σ_j exp(u_i · w_j + bias_j) [N] for u [N, h], w [M, h], bias [M]."""
    scores = u @ w.T
    return logsumexp(scores if bias is None else scores + bias, 1)
