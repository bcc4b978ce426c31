"""The public function, its choice of implementation and its closed-form gradient."""

from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.errors import InputError
from hmmlm.ops.linear_logsumexp.precision import matmul, resolve
from hmmlm.ops.residual_norm import naive

Impl = Literal["auto", "naive", "triton"]

_WIDEST = 1024  # a program of the kernels holds whole rows


def residual_norm(
    embedding: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, gamma: Tensor, beta: Tensor, *,
    eps: float = 1e-5, dropout: float = 0.0, impl: Impl = "auto",
) -> Tensor:  # fmt: skip
    """LN(ReLU(D w2ᵀ + b2) + D)·gamma + beta [..., h] with D = dropout(ReLU(E w1ᵀ + b1)), E being `embedding` [..., h].

    w1 and w2 are [h, h], the others [h]. Under autocast the operands of products and what is kept for the backward
    pass are of its dtype; from the kernels the result and all gradients are float32.
    """
    h = embedding.shape[-1]
    if w1.shape != (h, h) or w2.shape != (h, h) or any(x.shape != (h,) for x in (b1, b2, gamma, beta)):
        found = ", ".join(str(list(x.shape)) for x in (w1, b1, w2, b2, gamma, beta))
        raise InputError(f"residual_norm: for rows of {h} the parameters must be [{h}, {h}] and [{h}], not {found}")
    parameters = (w1, b1, w2, b2, gamma, beta)
    if impl not in ("auto", "naive", "triton"):
        raise InputError(f"residual_norm: impl {impl!r} is unknown: use auto, naive or triton")
    unfit = _unfit(embedding, parameters, dropout)
    if impl == "triton" and unfit:
        raise InputError(f"residual_norm: the triton kernels have no {unfit}: use impl='naive'")
    if impl == "naive" or unfit or (impl == "auto" and not (embedding.is_cuda and find_spec("triton"))):
        return naive.residual_norm(embedding, *parameters, eps, dropout)
    rows = embedding.reshape(-1, embedding.shape[-1])
    result: Tensor = _ResidualNorm.apply(resolve(embedding, None), eps, rows, *parameters)
    return result.view(embedding.shape)


class _ResidualNorm(torch.autograd.Function):
    """Keeps the operands of the products and the second linear; statistics of the norm are computed again."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, eps: float, embedding: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor,
        gamma: Tensor, beta: Tensor,
    ) -> Tensor:  # fmt: skip
        from hmmlm.ops.residual_norm import triton  # optional dependency

        with torch.autocast(embedding.device.type, enabled=False):
            e, w1, b1, w2, b2 = (x.to(dtype).contiguous() for x in (embedding, w1, b1, w2, b2))
            inner = torch.addmm(b1, e, w1.T).relu_()
            before = torch.addmm(b2, inner, w2.T)
            ctx.eps = eps
            ctx.save_for_backward(e, w1, w2, gamma, inner, before)
            return triton.norm(before, inner, gamma, beta, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from hmmlm.ops.residual_norm import triton

        e, w1, w2, gamma, inner, before = ctx.saved_tensors
        with torch.autocast(e.device.type, enabled=False):
            grad_sum, grad_second, sums = triton.norm_backward(grads[0].contiguous(), before, inner, gamma, ctx.eps)
            grad_b2, grad_gamma, grad_beta = sums.unbind()
            grad_inner = grad_sum.addmm_(grad_second, w2)  # what the sum passes on, and what comes through w2
            grad_first, grad_b1 = triton.relu_backward_(grad_inner, inner)
            grad_w1, grad_w2 = matmul(grad_first.T, e), matmul(grad_second.T, inner)
            return None, None, matmul(grad_first, w1), grad_w1, grad_b1, grad_w2, grad_b2, grad_gamma, grad_beta


def _unfit(embedding: Tensor, parameters: tuple[Tensor, ...], dropout: float) -> str:
    """What keeps the kernels from being used; empty if nothing does."""
    if dropout > 0:
        return "dropout"
    if any(x.dtype != torch.float32 for x in (embedding, *parameters)):
        return "dtype but float32"
    return f"rows over {_WIDEST}" if embedding.shape[-1] > _WIDEST else ""
