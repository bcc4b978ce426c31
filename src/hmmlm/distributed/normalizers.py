"""Rows divided among the processes of a run: each computes the normalizers of some states, and all get all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hmmlm.distributed.ranks import world
from hmmlm.ops.linear_logsumexp import linear_logsumexp


def split_linear_logsumexp(u: Tensor, w: Tensor) -> Tensor:
    """Compute log Σ_j exp(u_i · w_j) [N] for u [N, h] and w [M, h], which are the same in all processes of a run.

    In training, every process computes the rows of its part, in the forward and in the backward pass. Gradients of u
    and w are then those of its part of the rows, for the sum of the losses of all processes: their sum over processes
    is the gradient. Without gradients, or in a single process, it is `linear_logsumexp`.
    """
    ranks, training = world(), torch.is_grad_enabled() and (u.requires_grad or w.requires_grad)
    if not training or ranks.count == 1 or len(u) < ranks.count:
        return linear_logsumexp(u, w)
    rows = ranks.own_rows(len(u))
    result: Tensor = _Join.apply(linear_logsumexp(u[rows], w), len(u), rows)
    return result


class _Join(torch.autograd.Function):
    """The parts of all processes as one vector [N]; the gradient of a part is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, total: int, rows: slice) -> Tensor:
        ctx.rows = rows
        whole = part.new_zeros(total)
        whole[rows] = part
        world().sum_([whole])
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        whole = grads[0].clone()
        world().sum_([whole])
        return whole[ctx.rows], None, None
