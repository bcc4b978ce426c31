"""A transition of low rank (Chiu, Deng & Rush 2021): A = left · right."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.numerics.semirings import LOG, MAX_PLUS, Semiring
from hmmlm.numerics.support import BlockSupport, Support
from hmmlm.ops.common import logsumexp
from hmmlm.ops.pieces import at_once
from hmmlm.transitions.base import Transition


class LowRank(Transition):
    """A[i, j] = Σ_r left[i, r] right[r, j]: a state chooses one of R ranks, which chooses the next state.

    Both factors are log-distributions, log_left [Z, R] and log_right [R, Z]. A step takes O(Z·R). Viterbi's algorithm
    and the entropy of paths have no shortcut, because the sum over ranks is inside a maximum: they compute A in pieces,
    which takes O(Z²·R) for each step.
    """

    kind = "low-rank"
    TENSORS: ClassVar[dict[str, str]] = {"log_left": "states, rank", "log_right": "rank, states"}

    def __init__(self, log_left: Tensor, log_right: Tensor) -> None:
        self.log_left, self.log_right = log_left, log_right
        self._check()

    @cached_property
    def _forward(self) -> tuple[LogMatrix, LogMatrix]:
        return LogMatrix(self.log_left), LogMatrix(self.log_right)

    @cached_property
    def _backward(self) -> tuple[LogMatrix, LogMatrix]:
        return LogMatrix(self.log_right.t().contiguous()), LogMatrix(self.log_left.t().contiguous())

    def forward_step(self, ring: Semiring, x: Tensor, source: Support = None, target: Support = None) -> Tensor:
        if ring is MAX_PLUS:
            return super().forward_step(ring, x, source, target)
        first, second = self._forward
        return _enter(ring, _leave(ring, x, first, source), second, target)

    def backward_step(self, ring: Semiring, y: Tensor, source: Support = None, target: Support = None) -> Tensor:
        if ring is MAX_PLUS:
            return super().backward_step(ring, y, source, target)
        first, second = self._backward
        return _enter(ring, _leave(ring, y, first, target), second, source)

    def log_block(self, rows: slice, columns: slice) -> Tensor:
        return LOG.product(self.log_left[rows], LogMatrix(self.log_right[:, columns]))

    def log_entries(self, i: Tensor, j: Tensor) -> Tensor:
        return logsumexp(self.log_left[i] + self.log_right.t()[j], -1)

    def tiles(self, sources: Tensor, targets: Tensor, width: int) -> Tensor:
        left, right = _rows_of(self.log_left, sources, width), _rows_of(self.log_right.t(), targets, width)
        size = at_once(width * left[0].numel())
        pairs = zip(left.split(size), right.split(size), strict=True)
        return torch.cat([logsumexp(a[:, :, None] + b[:, None], -1) for a, b in pairs])

    def log_rows(self, states: Tensor) -> Tensor:
        return LOG.product(self.log_left[states], self._forward[1])

    def _into(self, states: Tensor) -> Tensor:
        return LOG.product(self.log_right.t()[states], self._backward[1])


def _leave(ring: Semiring, values: Tensor, matrix: LogMatrix, support: Support) -> Tensor:
    """Multiply values [n, K] over a support by the rows of a matrix [Z, R] of its states."""
    if not isinstance(support, BlockSupport) or support.wide:
        return ring.product(values, matrix)
    return ring.reduce(values, _rows_of(matrix.log_values, support.blocks, support.width))


def _enter(ring: Semiring, values: Tensor, matrix: LogMatrix, support: Support) -> Tensor:
    """Multiply values [n, R] by the columns of a matrix [R, Z] of the states of a support."""
    if not isinstance(support, BlockSupport) or support.wide:
        return ring.product(values, matrix)
    return ring.reduce(values, _rows_of(matrix.log_values.t(), support.blocks, support.width).transpose(1, 2))


def _rows_of(matrix: Tensor, blocks: Tensor, width: int) -> Tensor:
    """Return the rows [n, k, R] of a matrix [Z, R] that belong to the states of blocks [n]."""
    return matrix.unflatten(0, (-1, width))[blocks]
