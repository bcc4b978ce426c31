"""What the recursions of all queries work on: a batch sorted by length, and the forward recursion over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hmmlm.numerics.semirings import Semiring
from hmmlm.numerics.support import BlockSupport, Support, some_rows
from hmmlm.ops.common import NEG_INF


@dataclass(frozen=True)
class SortedBatch:
    """Token sequences, longest first: step t processes the first `active[t]` rows, N in all steps."""

    tokens: Tensor  # [B, T]; −1 beyond a sequence's length
    active: list[int]  # of every step with any row
    missing: list[bool]  # whether some active row has a missing token at step t
    order: Tensor  # [B] the original index of each row

    def unsort(self, values: Tensor, dim: int = 0) -> Tensor:
        """Return rows along `dim` in their original order."""
        if self.is_even:  # all are equally long, and were not moved
            return values
        return values.index_select(dim, self.order.argsort())

    @property
    def is_even(self) -> bool:
        """Whether all sequences are equally long."""
        return self.active[-1] == len(self.order)

    @cached_property
    def starts(self) -> list[int]:
        """The number of rows before each step, and in all."""
        return [0, *accumulate(self.active)]

    @cached_property
    def step(self) -> Tensor:
        """The step of each row [N], one step after the other."""
        active = torch.tensor(self.active, device=self.tokens.device)
        return torch.arange(len(active), device=active.device).repeat_interleave(active)

    @cached_property
    def row(self) -> Tensor:
        """The sequence of each row [N]."""
        return torch.arange(len(self.step), device=self.step.device) - self._starts[self.step]

    @cached_property
    def before(self) -> Tensor:
        """The row of the step before, of each row [N − active[0]] after the first step."""
        later = slice(self.active[0], None)
        return self._starts[self.step[later] - 1] + self.row[later]

    @cached_property
    def _starts(self) -> Tensor:
        return torch.tensor(self.starts, device=self.tokens.device)


class Packed(Sequence[Any]):
    """Values [n, …] of every step, one after the other in one tensor [N, …], or in a list.

    A hundred thousand tensors take seconds to make, so whatever can works on all of them at once.
    """

    def __init__(self, batch: SortedBatch, values: Any) -> None:
        self._batch, self._values = batch, values

    def __len__(self) -> int:
        return len(self._values) if isinstance(self._values, list) else len(self._batch.active)

    def __getitem__(self, t: Any) -> Any:
        return self._values[t] if isinstance(self._values, list) else self._steps[t]

    @cached_property
    def _steps(self) -> Sequence[Any]:
        """Views of the rows of each step."""
        return self._values.split(self._batch.active)

    def extend(self, values: Sequence[Tensor]) -> None:
        """Add the values of the next steps."""
        self._values.extend(values)

    @property
    def is_one(self) -> bool:
        """Whether there is one tensor, or one support, for all steps."""
        if isinstance(self._values, list):
            self._values = self._join(self._values)
        return not isinstance(self._values, list)

    def _join(self, steps: list[Any]) -> Any:
        """Return the values of all steps in one, or the list if they are over different numbers of states."""
        return torch.cat(steps) if len({values.shape[1:] for values in steps}) == 1 else steps

    @property
    def whole(self) -> Any:
        """What all steps have [N, …]."""
        assert self.is_one
        return self._values

    def pieces(self) -> Sequence[Tensor]:
        """Return the values in as few pieces as possible."""
        return [self.whole] if self.is_one else self

    def padded(self, fill: float) -> Tensor:
        """Return the values as [T, B, …], `fill` where a sequence has ended."""
        batch, rows = self._batch, self.whole
        if batch.is_even:
            return rows.unflatten(0, (len(batch.active), -1))
        result = rows.new_full((len(batch.active), batch.active[0], *rows.shape[1:]), fill)
        result[batch.step, batch.row] = rows
        return result

    def map(self, function: Callable[..., Tensor], *others: Packed) -> Packed:
        """Return a function of these values and of others, of all steps at once where that is possible."""
        every = (self, *others)
        if all(values.is_one for values in every):
            return Packed(self._batch, function(*(values.whole for values in every)))
        return Packed(self._batch, [function(*each) for each in zip(*every, strict=True)])


class Supports(Packed):
    """The support of every step: one for the rows of all steps [N], or a list if they are of several kinds."""

    @cached_property
    def _steps(self) -> Sequence[Any]:
        whole, active = self._values, self._batch.active
        if not isinstance(whole, BlockSupport):
            return [
                some_rows(whole, slice(first, first + n)) for first, n in zip(self._batch.starts, active, strict=False)
            ]
        return [whole._replace(blocks=blocks) for blocks in whole.blocks.split(active)]

    def _join(self, steps: list[Any]) -> Any:
        blocks = [own.blocks for own in steps if isinstance(own, BlockSupport) and not own.wide]
        if len(blocks) == len(steps):
            return BlockSupport(torch.cat(blocks), steps[0].width)
        return steps if any(own is not None for own in steps) else None

    @property
    def blocks(self) -> BlockSupport | None:
        """That of all rows, if it is a single block for each."""
        own = self.whole if self.is_one else None
        return own if isinstance(own, BlockSupport) and not own.wide else None


class Stack(NamedTuple):
    """Rows of one or several steps."""

    row: Tensor  # [n] of the batch
    step: Tensor  # [n]
    values: Tensor  # [n, K] over the support
    support: Support


class Lattice(NamedTuple):
    """The forward recursion: one entry per step, over the active rows and their supports.

    Values are those of a semiring: logarithms, unless it is that of probabilities.
    """

    batch: SortedBatch
    supports: Supports
    scores: Packed  # [n, K] p(x_t | z)
    filtered: Packed  # [n, K] p(z_t | x_1..t); in max-plus of the best path to each state
    scales: Packed  # [n] p(x_t | x_1..t−1)
    stacked: Any = None  # what a kind of HMM that computed all steps at once keeps of them

    @classmethod
    def begin(cls, batch: SortedBatch, supports: Supports, scores: Packed) -> Lattice:
        """Return a lattice without steps, for the supports of tokens and their scores."""
        return cls(batch, supports, scores, Packed(batch, []), Packed(batch, []))

    def log_likelihood(self) -> Tensor:
        """Return log p(x) [B] in float64, rows in the order of the batch; zero gradient for impossible sequences."""
        total = self.scales.padded(0.0).sum(0, dtype=torch.float64)
        return torch.where(total.detach() == NEG_INF, NEG_INF, total)

    def take(self, values: Packed, steps: Sequence[int], counts: Sequence[int]) -> list[Stack]:
        """Return the first `counts[i]` rows of values at each of some steps, together if there is one support for all.

        Otherwise each step is a stack of its own.
        """
        batch, device = self.batch, self.batch.tokens.device
        if not self.supports.is_one:
            rows = [torch.arange(count, device=device) for count in counts]
            return [
                Stack(own, torch.full_like(own, t), values[t][: len(own)], some_rows(self.supports[t], slice(len(own))))
                for t, own in zip(steps, rows, strict=True)
            ]
        if not steps:
            return []
        if isinstance(steps, range) and list(counts) == batch.active[steps.start : steps.stop]:
            every: slice | Tensor = slice(batch.starts[steps.start], batch.starts[steps.stop])
        else:
            sizes, starts = (torch.tensor(each, device=device) for each in (counts, [batch.starts[t] for t in steps]))
            first = (starts - sizes.cumsum(0) + sizes).repeat_interleave(sizes)
            every = first + torch.arange(len(first), device=device)
        return [Stack(batch.row[every], batch.step[every], values.whole[every], some_rows(self.supports.whole, every))]

    def rows(self, values: Packed) -> list[Stack]:
        """Return the values of all rows."""
        return self.take(values, range(len(self.batch.active)), self.batch.active)

    def pairs(self, before: Packed, after: Packed) -> list[tuple[Stack, Stack]]:
        """Return the values of all rows at the step before and at their own, of those that have a step before."""
        active = self.batch.active
        last = len(active) - 1
        sides = self.take(before, range(last), active[1:]), self.take(after, range(1, last + 1), active[1:])
        return list(zip(*sides, strict=True))


def endings(active: list[int]) -> list[tuple[int, slice]]:
    """Return the steps at which sequences end, and the rows that end there, from the number of rows of each step."""
    following = [*active[1:], 0]
    both = enumerate(zip(active, following, strict=True))
    return [(t, slice(after, rows)) for t, (rows, after) in both if after < rows]


def condition(ring: Semiring, predicted: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return p(z | past, x) [n, K] and p(x | past) [n], from predictions p(z | past) and the scores of a token."""
    joint = ring.times(predicted, scores)
    total = ring.total(joint)
    return ring.divide(joint, total), total
