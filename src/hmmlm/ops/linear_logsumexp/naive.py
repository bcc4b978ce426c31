"""The specification: the whole score matrix at once."""

import torch
from torch import Tensor


def logsumexp(scores: Tensor, dim: int) -> Tensor:
    """logsumexp over `dim` whose gradient is zero, not NaN, where every score is −inf."""
    dead = (scores == -torch.inf).all(dim, keepdim=True)
    return torch.logsumexp(scores.masked_fill(dead, 0.0), dim).masked_fill(dead.squeeze(dim), -torch.inf)


def linear_logsumexp(u: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """log Σ_j exp(u_i · w_j + bias_j) [N] for u [N, h], w [M, h], bias [M]."""
    scores = u @ w.T
    return logsumexp(scores if bias is None else scores + bias, 1)
