"""Rows of a matrix that are divided among the processes of a run, as one differentiable matrix."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hmmlm.ranks import world


def join_rows(own: Tensor) -> Tensor:
    """Return the matrix [N, M] of which every process has rows [N / processes, M], in order.

    The gradient of a process's rows is that of the sum of the losses of all processes, so that it is not summed again.
    """
    result: Tensor = _JoinRows.apply(own)
    return result


class _JoinRows(Function):
    """Gather rows in the forward pass; sum the gradients of the matrix and return those of the rows in the backward."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        return world().join_rows(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return world().sum_own_rows(grads[0])
