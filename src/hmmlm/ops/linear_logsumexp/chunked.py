"""Portable implementation: the score matrix in tiles, of which one exists at a time."""

import torch
from torch import Tensor

from hmmlm.ops.common import accumulate, matmul, wide
from hmmlm.ops.pieces import at_once

_ROWS = 2048  # rows of a tile at most; more do not make a product faster
_CPU_TILE = 512, 1024  # rows and columns: what stays in the cache of a core is not written to memory


def _tiles(u: Tensor, w: Tensor) -> tuple[list[slice], list[slice]]:
    """Return the rows and the columns of the tiles of scores [N, M]."""
    rows, columns = min(_ROWS, at_once(len(w))), len(w)
    if u.device.type == "cpu":
        rows, columns = _CPU_TILE
    return _pieces(len(u), rows), _pieces(len(w), columns)


def _pieces(length: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, length)) for first in range(0, length, size)]


def _scores(u: Tensor, w: Tensor, bias: Tensor | None, columns: slice) -> Tensor:
    """Compute a tile of scores [N, columns], as a new tensor."""
    scores = matmul(u, w[columns].T)
    return scores if bias is None else scores.add_(bias[columns])


def forward(u: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the logsumexp [N] in the wide dtype."""
    out = u.new_empty(u.shape[0], dtype=wide(u.dtype))
    chunks, columns_of = _tiles(u, w)
    for chunk in chunks:
        top, total = torch.full_like(out[chunk], torch.finfo(out.dtype).min), torch.zeros_like(out[chunk])
        for columns in columns_of:
            scores = _scores(u[chunk], w, bias, columns)
            before, top = top, torch.maximum(top, scores.amax(1))
            total = total.mul_((before - top).exp_()).add_(scores.sub_(top[:, None]).exp_().sum(1))
        out[chunk] = total.log_().add_(top)
    return out


def backward(
    grad: Tensor, u: Tensor, w: Tensor, bias: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute gradients of u, w and bias in the wide dtype; recompute the softmax tile by tile."""
    grad_u, grad_w = (torch.zeros_like(each, dtype=out.dtype) for each in (u, w))
    grad_bias = None if bias is None else torch.zeros_like(bias, dtype=out.dtype)
    reference = out.masked_fill(out == -torch.inf, 0.0)  # rows of −inf: exp(−inf − 0) = 0
    chunks, columns_of = _tiles(u, w)
    for chunk in chunks:
        for columns in columns_of:
            weight = _scores(u[chunk], w, bias, columns)
            weight.sub_(reference[chunk, None]).exp_().mul_(grad[chunk, None])
            if grad_bias is not None:
                grad_bias[columns] += weight.sum(0)
            weight = weight.to(u.dtype)
            accumulate(grad_u[chunk], weight, w[columns])
            accumulate(grad_w[columns], weight.T, u[chunk])
    return grad_u, grad_w, grad_bias
