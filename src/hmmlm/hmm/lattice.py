"""What the recursions of all queries work on: a batch sorted by length, and the forward recursion over it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hmmlm.hmm.protocol import Support
from hmmlm.ops.common import NEG_INF


class SortedBatch(NamedTuple):
    """Token sequences, longest first: step t processes the first `active[t]` rows."""

    tokens: Tensor  # [B, T]; −1 beyond a sequence's length
    active: list[int]  # of every step with any row
    missing: list[bool]  # whether some active row has a missing token at step t
    order: Tensor  # [B] the original index of each row

    def unsort(self, values: Tensor, dim: int = 0) -> Tensor:
        """Return rows along `dim` in their original order."""
        if self.active[-1] == len(self.order):  # all are equally long, and were not moved
            return values
        return values.index_select(dim, self.order.argsort())


class Lattice(NamedTuple):
    """The forward recursion: one entry per step, over the active rows and their supports."""

    batch: SortedBatch
    supports: list[Support]
    scores: list[Tensor]  # [n, K] log p(x_t | z)
    log_filtered: list[Tensor]  # [n, K] log p(z_t | x_1..t)
    log_scales: list[Tensor]  # [n] log p(x_t | x_1..t−1)
    stacked: Any = None  # what a kind of HMM that computed all steps at once keeps of them

    def log_likelihood(self) -> Tensor:
        """Return log p(x) [B] in float64, rows in the order of the batch; zero gradient for impossible sequences."""
        total = pad_sequence(self.log_scales, batch_first=True).sum(0, dtype=torch.float64)
        return torch.where(total.detach() == NEG_INF, NEG_INF, total)


def add_first(values: Tensor, added: Tensor) -> Tensor:
    """Return values [n, K] with `added` [m, K], m ≤ n, added to the first rows."""
    rows = len(added)
    return values + added if rows == len(values) else torch.cat([values[:rows] + added, values[rows:]])


def first_rows(support: Support, rows: int) -> Support:
    """Return the support of the first rows."""
    return some_rows(support, slice(0, rows))


def some_rows(support: Support, rows: slice) -> Support:
    return None if support is None else support.rows(rows)


def endings(batch: SortedBatch) -> list[tuple[int, slice]]:
    """Return the steps at which sequences end, and the rows that end there."""
    following = [*batch.active[1:], 0]
    return [
        (t, slice(after, rows))
        for t, (rows, after) in enumerate(zip(batch.active, following, strict=True))
        if after < rows
    ]


def continuing(lattice: Lattice, active: list[int]) -> Iterator[tuple[int, int, Tensor, Support]]:
    """Yield t, n, log p(z_t−1 | x_1..t−1) [n, K] and its support for the n rows that have a token at t = 1, 2, ….

    `active` are the rows of each step of the lattice, and of the one after it if there is one.
    """
    for t, rows in enumerate(active[1 : len(lattice.supports) + 1], 1):
        yield t, rows, lattice.log_filtered[t - 1][:rows], first_rows(lattice.supports[t - 1], rows)
