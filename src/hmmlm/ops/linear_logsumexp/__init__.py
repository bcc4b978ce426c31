"""logsumexp of a linear layer: the normalizer of softmax(U Wᵀ + b) in O(N) memory.

On a CPU, scores are computed in tiles. The Triton kernels store none (some rows at a time in the backward pass for rows
over 512 bytes).
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.errors import InputError
from hmmlm.ops.common import find_kernels, product_dtype, wide
from hmmlm.ops.linear_logsumexp import chunked


def linear_logsumexp(u: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute log Σ_j exp(u_i · w_j + bias_j) [N] for u [N, h], w [M, h], bias [M]; differentiable in all three.

    Operands of products are in autocast's dtype, else in that of u. Sums and the result are float32, or float64 for
    float64 products. A bias of −inf removes its column.
    """
    _check(u, w, bias)
    dtype = product_dtype(u)
    kernels = find_kernels("linear_logsumexp", u.device, dtype == torch.float64) or chunked
    result: Tensor = _LinearLogSumExp.apply(kernels, dtype, u, w, bias)
    return result


class _LinearLogSumExp(torch.autograd.Function):
    """Autograd function of `linear_logsumexp`; rounds the operands itself, so that gradients stay in the wide dtype."""

    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, dtype: torch.dtype, u: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        factors = u.to(dtype).contiguous(), w.to(dtype).contiguous()
        offset = None if bias is None else bias.to(wide(dtype)).contiguous()
        out: Tensor = kernels.forward(*factors, offset)
        ctx.kernels, ctx.dtypes = kernels, [x if x is None else x.dtype for x in (u, w, bias)]
        ctx.save_for_backward(*factors, offset, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.kernels.backward(grads[0].contiguous(), *ctx.saved_tensors)
        return None, None, *(g if g is None else g.to(d) for g, d in zip(gradients, ctx.dtypes, strict=True))


def _check(u: Tensor, w: Tensor, bias: Tensor | None) -> None:
    """Raise an InputError that names the tensor with a wrong shape."""
    if u.dim() != 2 or w.dim() != 2 or u.shape[1] != w.shape[1] or not w.shape[0]:
        raise InputError(f"linear_logsumexp: u {list(u.shape)} and w {list(w.shape)} must be [N, h] and [M, h], M > 0")
    if bias is not None and bias.shape != w.shape[:1]:
        raise InputError(f"linear_logsumexp: bias {list(bias.shape)} must be [{w.shape[0]}], one per row of w")
