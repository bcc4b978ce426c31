"""What the recursions of all queries work on: a batch sorted by length, and the forward recursion over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hmmlm.numerics.semirings import Semiring
from hmmlm.numerics.support import BlockSupport, Support, first_rows
from hmmlm.ops.common import NEG_INF

Observed = tuple[Support, Tensor]
"""The support of tokens [n], and their scores [n, K]."""
Step = tuple[int, int, Tensor, Support]
"""t, and n rows of values [n, K] over a support."""
Stack = tuple[Tensor, Tensor, Tensor, Support]
"""The row [n] in the batch, the step [n] and values [n, K] over a support, of several steps."""


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
    """The forward recursion: one entry per step, over the active rows and their supports.

    Values are those of a semiring: logarithms, unless it is that of probabilities.
    """

    batch: SortedBatch
    supports: list[Support]
    scores: list[Tensor]  # [n, K] p(x_t | z)
    filtered: list[Tensor]  # [n, K] p(z_t | x_1..t); in max-plus of the best path to each state
    scales: list[Tensor]  # [n] p(x_t | x_1..t−1)
    stacked: Any = None  # what a kind of HMM that computed all steps at once keeps of them

    def log_likelihood(self) -> Tensor:
        """Return log p(x) [B] in float64, rows in the order of the batch; zero gradient for impossible sequences."""
        total = pad_sequence(self.scales, batch_first=True).sum(0, dtype=torch.float64)
        return torch.where(total.detach() == NEG_INF, NEG_INF, total)


def add_first(values: Tensor, added: Tensor) -> Tensor:
    """Return values [n, K] with `added` [m, K], m ≤ n, added to the first rows."""
    rows = len(added)
    return values + added if rows == len(values) else torch.cat([values[:rows] + added, values[rows:]])


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
        yield t, rows, lattice.filtered[t - 1][:rows], first_rows(lattice.supports[t - 1], rows)


def stack_together(*sides: list[Step]) -> tuple[list[Stack], ...]:
    """Return `stack_steps` of lists with the same rows and steps: of all of them, or each step apart."""
    whole = tuple(map(stack_steps, sides))
    if len({len(side) for side in whole}) == 1:
        return whole
    return tuple([stack for step in side for stack in stack_steps([step])] for side in sides)


def stack_steps(steps: list[Step]) -> list[Stack]:
    """Return the rows of all steps together; apart, if their supports differ in kind."""
    blocks = [s for *_, s in steps if isinstance(s, BlockSupport) and not s.wide]
    everywhere = all(s is None for *_, s in steps)
    if len(steps) > 1 and not (everywhere or len(blocks) == len(steps)):
        return [stack for step in steps for stack in stack_steps([step])]
    if not steps:
        return []
    times, sizes, values, supports = zip(*steps, strict=True)
    support = supports[0]
    if len(blocks) > 1:
        support = blocks[0]._replace(blocks=torch.cat([s.blocks for s in blocks]))
    device = values[0].device
    counts = torch.tensor(sizes, device=device)
    begins = (counts.cumsum(0) - counts).repeat_interleave(counts)
    rows = torch.arange(len(begins), device=device) - begins
    return [(rows, torch.tensor(times, device=device).repeat_interleave(counts), torch.cat(values), support)]


def condition(ring: Semiring, predicted: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return p(z | past, x) [n, K] and p(x | past) [n], from predictions p(z | past) and the scores of a token."""
    joint = ring.times(predicted, scores)
    total = ring.total(joint)
    return ring.divide(joint, total), total
