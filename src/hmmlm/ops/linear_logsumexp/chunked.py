"""Portable implementation: rows in chunks, so that only a slice of the score matrix exists at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hmmlm.ops.common import accumulate, matmul, wide

_CHUNK = 2**24  # scores held at a time: 64 MB in float32
_ROWS = 2048  # rows of a product at most; more do not make it faster


def _score_chunks(u: Tensor, w: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield a slice of the rows of u and their scores [rows, M]."""
    rows = max(1, min(_ROWS, _CHUNK // w.shape[0]))
    for first in range(0, u.shape[0], rows):
        chunk = slice(first, first + rows)
        scores = matmul(u[chunk], w.T)
        yield chunk, scores if bias is None else scores.add_(bias)


def forward(u: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the logsumexp [N] in the wide dtype."""
    out = u.new_empty(u.shape[0], dtype=wide(u.dtype))
    for chunk, scores in _score_chunks(u, w, bias):
        out[chunk] = torch.logsumexp(scores, 1)
    return out


def backward(
    grad: Tensor, u: Tensor, w: Tensor, bias: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute gradients of u, w and bias in the wide dtype; recompute the softmax chunk by chunk."""
    grad_u, grad_w = torch.empty_like(u, dtype=out.dtype), torch.zeros_like(w, dtype=out.dtype)
    grad_bias = None if bias is None else torch.zeros_like(bias, dtype=out.dtype)
    reference = out.masked_fill(out == -torch.inf, 0.0)  # rows of −inf: exp(−inf − 0) = 0
    for chunk, scores in _score_chunks(u, w, bias):
        weight = scores.sub_(reference[chunk, None]).exp_().mul_(grad[chunk, None])
        if grad_bias is not None:
            grad_bias += weight.sum(0)
        weight = weight.to(u.dtype)
        grad_u[chunk] = matmul(weight, w)
        accumulate(grad_w, weight.T, u[chunk])
    return grad_u, grad_w, grad_bias
