"""The public function, its choice of implementation and its closed-form gradient."""

from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.ops.choice import kernels
from hmmlm.ops.linear_logsumexp import naive
from hmmlm.ops.linear_logsumexp.precision import resolve, wide

Impl = Literal["auto", "naive", "torch", "triton"]


def linear_logsumexp(
    u: Tensor, w: Tensor, bias: Tensor | None = None, *, product_dtype: torch.dtype | None = None, impl: Impl = "auto"
) -> Tensor:
    """log Σ_j exp(u_i · w_j + bias_j) [N] for u [N, h], w [M, h], bias [M]; differentiable in all three.

    `product_dtype` is the dtype of the operands of matrix products (autocast's, or that of u, when not given); sums
    and the result are float32, or float64 for float64 products. A bias of −inf takes its column out. impl="naive"
    computes in the dtype of u throughout.
    """
    _check(u, w, bias)
    if impl == "naive":
        return naive.linear_logsumexp(u, w, bias)
    dtype = resolve(u, product_dtype)
    chosen = kernels("linear_logsumexp", impl, u, "float64" if dtype == torch.float64 else "")
    result: Tensor = _LinearLogSumExp.apply(chosen, dtype, u, w, bias)
    return result


class _LinearLogSumExp(torch.autograd.Function):
    """Operands are rounded here, not before, so that gradients leave in the wide dtype."""

    @staticmethod
    def forward(
        ctx: Any, kernels: ModuleType, dtype: torch.dtype, u: Tensor, w: Tensor, bias: Tensor | None
    ) -> Tensor:
        factors = u.to(dtype).contiguous(), w.to(dtype).contiguous()
        offset = None if bias is None else bias.to(wide(dtype)).contiguous()
        out: Tensor = kernels.forward(*factors, offset)
        ctx.kernels, ctx.dtypes = kernels, [x if x is None else x.dtype for x in (u, w, bias)]
        ctx.save_for_backward(*factors, offset, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.kernels.backward(grads[0].contiguous(), *ctx.saved_tensors)
        return None, None, *(g if g is None else g.to(d) for g, d in zip(gradients, ctx.dtypes, strict=True))


def _check(u: Tensor, w: Tensor, bias: Tensor | None) -> None:
    if u.dim() != 2 or w.dim() != 2 or u.shape[1] != w.shape[1] or not w.shape[0]:
        raise InputError(f"linear_logsumexp: u {list(u.shape)} and w {list(w.shape)} must be [N, h] and [M, h], M > 0")
    if bias is not None and bias.shape != w.shape[:1]:
        raise InputError(f"linear_logsumexp: bias {list(bias.shape)} must be [{w.shape[0]}], one a row of w")
