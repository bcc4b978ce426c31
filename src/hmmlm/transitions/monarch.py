"""A Monarch transition: two block-diagonal products with a permutation between them."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from torch import Tensor

from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.numerics.semirings import Semiring
from hmmlm.numerics.support import BlockSupport, Support, restrict, spread
from hmmlm.transitions.base import Transition


class Monarch(Transition):
    """p((i', k) | (i, j)) = left[i, j, k] · right[k, i, i'] for states (i, j) = i·b + j, in a groups of b.

    Both factors are log-distributions, log_left [a, b, b] and log_right [b, a, a]. A step takes O(Z·(a + b)), whatever
    the supports. There is one path through the factors for each pair of states, so maxima factor as sums do.
    """

    kind = "monarch"
    TENSORS: ClassVar[dict[str, str]] = {
        "log_left": "groups, states of a group, states of a group",
        "log_right": "states of a group, groups, groups",
    }

    def __init__(self, log_left: Tensor, log_right: Tensor) -> None:
        self.log_left, self.log_right = log_left, log_right
        self._check()
        self.groups, self.width = log_left.shape[:2]

    @property
    def num_states(self) -> int:
        return self.groups * self.width

    @cached_property
    def _forward(self) -> tuple[LogMatrix, LogMatrix]:
        return LogMatrix(self.log_left), LogMatrix(self.log_right)

    @cached_property
    def _backward(self) -> tuple[LogMatrix, LogMatrix]:
        return LogMatrix(self.log_right.mT.contiguous()), LogMatrix(self.log_left.mT.contiguous())

    def forward_step(self, ring: Semiring, x: Tensor, source: Support = None, target: Support = None) -> Tensor:
        left, right = self._forward
        before = self._spread(ring, x, source).transpose(0, 1)  # [i, n, j]
        between = ring.product(before, left)  # [i, n, k]
        after = ring.product(between.permute(2, 1, 0), right)  # [k, n, i']
        return _over(after.permute(1, 2, 0).flatten(1), target)

    def backward_step(self, ring: Semiring, y: Tensor, source: Support = None, target: Support = None) -> Tensor:
        right, left = self._backward
        after = self._spread(ring, y, target).permute(2, 0, 1)  # [k, n, i']
        between = ring.product(after, right)  # [k, n, i]
        before = ring.product(between.permute(2, 1, 0), left)  # [i, n, j]
        return _over(before.transpose(0, 1).flatten(1), source)

    def _spread(self, ring: Semiring, values: Tensor, support: Support) -> Tensor:
        """Return values over a support as values over all states [n, a, b]."""
        return spread(values, support, self.num_states, ring.zero).unflatten(1, (self.groups, self.width))

    def log_entries(self, i: Tensor, j: Tensor) -> Tensor:
        group, middle = i // self.width, j % self.width
        return self.log_left[group, i % self.width, middle] + self.log_right[middle, group, j // self.width]


def _over(values: Tensor, support: Support) -> Tensor:
    """Return values over all states on a support; a wide one keeps them all."""
    return restrict(values, support) if isinstance(support, BlockSupport) and not support.wide else values
