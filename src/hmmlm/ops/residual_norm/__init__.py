"""Residual network of Chiu & Rush (2020): LN(ReLU(D W2ᵀ + b2) + D) with D = ReLU(E W1ᵀ + b1).

A composition of PyTorch operations, on any device and in any dtype, with optional dropout. With the Triton kernels
PyTorch computes the linear layers, and one forward and two backward kernels the rest.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hmmlm.ops.common import find_kernels, matmul, product_dtype

_WIDEST = 1024  # elements per row: a program of the kernels holds whole rows


def residual_norm(
    embedding: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    gamma: Tensor,
    beta: Tensor,
    *,
    eps: float = 1e-5,
    dropout: float = 0.0,
) -> Tensor:
    """Compute LN(ReLU(D w2ᵀ + b2) + D)·gamma + beta [..., h] with D = dropout(ReLU(E w1ᵀ + b1)).

    E is `embedding` [..., d]; w1 is [h, d], w2 [h, h], the others [h]. Under autocast, the operands of products and the
    tensors saved for the backward pass have autocast's dtype. The kernels return float32, also for gradients.
    """
    width, h = embedding.shape[-1], len(w2)
    parameters = (w1, b1, w2, b2, gamma, beta)
    narrow = all(x.dtype == torch.float32 for x in (embedding, *parameters)) and h <= _WIDEST
    kernels = find_kernels("residual_norm", embedding.device, dropout or not narrow)
    if kernels is None:
        inner = functional.dropout(functional.linear(embedding, w1, b1).relu(), dropout)
        return functional.layer_norm(functional.linear(inner, w2, b2).relu() + inner, gamma.shape, gamma, beta, eps)
    rows = embedding.reshape(-1, width)
    result: Tensor = _ResidualNorm.apply(kernels, product_dtype(embedding), eps, rows, *parameters)
    return result.view(*embedding.shape[:-1], h)


class _ResidualNorm(torch.autograd.Function):
    """Autograd function of the kernels: saves operands and the second linear; recomputes the norm's statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: ModuleType,
        dtype: torch.dtype,
        eps: float,
        embedding: Tensor,
        w1: Tensor,
        b1: Tensor,
        w2: Tensor,
        b2: Tensor,
        gamma: Tensor,
        beta: Tensor,
    ) -> Tensor:
        with torch.autocast(embedding.device.type, enabled=False):
            e, w1, b1, w2, b2 = (x.to(dtype).contiguous() for x in (embedding, w1, b1, w2, b2))
            inner: Tensor = torch._addmm_activation(b1, e, w1.T)  # ReLU, by the product's own kernel
            before = torch.addmm(b2, inner, w2.T)
            ctx.kernels, ctx.eps = kernels, eps
            ctx.save_for_backward(e, w1, w2, gamma, inner, before)
            return kernels.norm(before, inner, gamma, beta, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        e, w1, w2, gamma, inner, before = ctx.saved_tensors
        with torch.autocast(e.device.type, enabled=False):
            grad_sum, grad_second, sums = ctx.kernels.norm_backward(
                grads[0].contiguous(), before, inner, gamma, ctx.eps
            )
            grad_b2, grad_gamma, grad_beta = sums.unbind()
            grad_inner = grad_sum.addmm_(grad_second, w2)  # through the residual sum and through w2
            grad_first, grad_b1 = ctx.kernels.relu_backward_(grad_inner, inner)
            grad_w1, grad_w2 = matmul(grad_first.T, e), matmul(grad_second.T, inner)
            return None, None, None, matmul(grad_first, w1), grad_w1, grad_b1, grad_w2, grad_b2, grad_gamma, grad_beta
