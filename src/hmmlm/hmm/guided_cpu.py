"""One token of several texts under constraints, on a CPU: what the kernels of `guided_step` do, with few operations.

Arrays of the size of the states belong to NumPy, whose operations on small arrays take a tenth of the time of torch's;
those of the size of the vocabulary to torch, which has several threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hmmlm.emissions import Categorical
from hmmlm.hmm.guided_step import StepResult, StepRows
from hmmlm.ops.common import NEG_INF
from hmmlm.ops.underflow import FLOOR, least_sum
from hmmlm.transitions import Dense

if TYPE_CHECKING:
    from hmmlm.hmm.constraints import Reached

_MOST_CELLS = 2**22  # of the tokens of a row that are scored alone
_LEAST = FLOOR[torch.float32]  # smaller weights count as zero, because denormal numbers are slow


class CpuPlan(NamedTuple):
    """The rows of a table of the recursion that score the tokens which may follow an automaton state."""

    table: np.ndarray  # [rows, Z]
    places: list[int]  # [m] rows of the automaton states that many tokens lead to; −1: not accepted any more
    live: list[int]  # the indices of those that are accepted
    tokens: np.ndarray  # [n] the tokens that are scored alone
    rows: np.ndarray  # [n] their rows
    few: np.ndarray  # the tokens of no place
    cells: Tensor | None  # [V] of `Guide.cells`

    def with_table(self, table: Tensor) -> CpuPlan:
        """Return the plan of another table, whose rows are of the same automaton states."""
        return self._replace(table=table.numpy())


def make_cpu_plan(table: Tensor, reached: Reached, few: Tensor, cells: Tensor | None) -> CpuPlan:
    """Return the plan of a table [rows, Z]; for the others see `Guide`."""
    live = [number for number, place in enumerate(reached.places) if place >= 0]
    rows = np.array(reached.rows, dtype=np.int64)
    return CpuPlan(table.numpy(), reached.places, live, reached.tokens.numpy(), rows, few.numpy(), cells)


class CpuSteps:
    """Steps of one HMM in float32."""

    def __init__(self, transition: Dense, emission: Categorical) -> None:
        self.transition, self.emission = transition, emission
        self._least = least_sum(transition.num_states, torch.float32)

    def _emitted(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return log p(token | z) [n, Z] of tokens [n]."""
        return self.emission.log_probs.numpy()[:, tokens].T

    def run(self, rows: StepRows[CpuPlan], scores: Tensor, weight: float) -> StepResult | None:
        """Return steered scores for scores [B, V]; see `GuidedSteps.run`."""
        constrained = [row for row, plan in enumerate(rows.plans) if plan is not None]
        plans = [plan for plan in rows.plans if plan is not None]
        alone = max(len(plan.tokens) for plan in plans)
        if scores.dtype != torch.float32 or alone * self.transition.num_states > _MOST_CELLS:
            return None
        states = rows.log_states.numpy()[[rows.of_row[row] for row in constrained]]
        if rows.tokens is not None:
            moved = self._read(states, [rows.tokens[row] for row in constrained])
            if moved is None:
                return None
            states = moved
        chances = self._chances(states, plans)
        if chances is None:
            return None
        whole = len(constrained) == len(scores)
        before = scores.detach() if whole else scores[constrained].detach()
        after = steer(before, chances, weight)
        best, choices = after.numpy().argmax(1), before.numpy().argmax(1)
        every, steered = np.arange(len(after)), after.numpy()
        top = steered[every, best]
        if not top.min() > NEG_INF:  # or NaN
            return None
        changed = int((steered[every, choices] < top).sum())
        after = after.log_softmax(1)
        masses = torch.from_numpy(top - after.numpy()[every, best])
        if whole:
            return StepResult(after, torch.from_numpy(states), changed, masses)
        log_states, log_masses = rows.log_states.new_zeros(len(scores), states.shape[1]), masses.new_zeros(len(scores))
        log_states[constrained], log_masses[constrained] = torch.from_numpy(states), masses
        out = scores.detach().clone()
        out[constrained] = after
        return StepResult(out, log_states, changed, log_masses)

    def _read(self, states: np.ndarray, tokens: Sequence[int]) -> np.ndarray | None:
        """Return log p(z of the next token) [n, Z] after one token each; None if underflow may have changed a sum."""
        joint = states + self._emitted(tokens)
        peak = joint.max(1, keepdims=True)
        if not peak.min() > NEG_INF:
            return None
        probs = np.exp(joint - peak)
        probs /= probs.sum(1, keepdims=True)
        probs[probs < _LEAST] = 0.0
        matrix = self.transition.matrix()
        moved = matrix.multiply(torch.from_numpy(probs)).numpy()
        return np.log(moved) + matrix.peak.numpy() if moved.min() >= self._least else None

    def _chances(self, states: np.ndarray, plans: Sequence[CpuPlan]) -> Tensor | None:
        """Compute log p(all accepted | tokens so far, next token = v) [n, V] for log p(z of the next token) [n, Z]."""
        columns = self._columns(states, plans)
        if columns is None:
            return None
        own = all(plan.cells is None and plan.live for plan in plans)  # a row each, in which each token has a column
        chances = columns if own else torch.full((len(plans), self.emission.vocab_size), NEG_INF)
        cells, first = chances.numpy(), 0
        for row, plan in enumerate(plans):
            count = len(plan.live)
            if count and plan.cells is not None:
                values = torch.full((len(plan.places) + 1, columns.shape[1]), NEG_INF)  # the last: for other tokens
                values[plan.live] = columns[first : first + count]
                torch.index_select(values.view(-1), 0, plan.cells, out=chances[row])
            elif count:
                if not own:
                    chances[row] = columns[first]
                cells[row, plan.few] = NEG_INF
            first += count
            if len(plan.tokens):
                plain = states[row] + self._emitted(plan.tokens)
                cells[row, plan.tokens] = _log_ratios(plain + plan.table[plan.rows], plain)
        # At most 0: the terms of a ratio are rounded differently.
        return chances.clamp_(max=0)

    def _columns(self, states: np.ndarray, plans: Sequence[CpuPlan]) -> Tensor | None:
        """Compute the chances of the columns of emissions [m, U] for each live place of each row."""
        n, rows = len(states), [row for row, plan in enumerate(plans) for _ in plan.live]
        if not rows:
            return torch.empty(0, len(self.emission.matrix.matrix.peak))
        tables = [plan.table[[plan.places[number] for number in plan.live]] for plan in plans]
        weights = np.concatenate([states, states[rows] + np.concatenate(tables)])
        tops = weights.max(1, keepdims=True)
        if not tops.min() > NEG_INF:
            return None
        weights -= tops
        np.exp(weights, out=weights)
        weights[weights < _LEAST] = 0.0
        sums = self.emission.matrix.matrix.multiply(torch.from_numpy(weights))
        if not float(sums.amin()) >= self._least:
            return None
        # The largest entries of the columns cancel, and one logarithm is enough.
        plain = sums[:n] if rows == list(range(n)) else sums[rows]
        ratios = (sums[n:] / plain).log_().add_(torch.from_numpy(tops[n:] - tops[rows]))
        return ratios.contiguous()  # only now: a product that is stored by columns has twice the size


def _log_ratios(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Compute log Σ exp of rows [n, Z] less that of other rows [n, Z], −inf where the first is."""
    top, base = numerators.max(1, keepdims=True), denominators.max(1, keepdims=True)
    possible = top[:, 0] > NEG_INF
    top[~possible] = base[~possible] = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.exp(numerators - top).sum(1) / np.exp(denominators - base).sum(1)
        return np.where(possible, np.log(ratios) + (top - base)[:, 0], NEG_INF)


def steer(scores: Tensor, chances: Tensor, weight: float) -> Tensor:
    """Return scores [n, V] with weight · chances [n, W ≤ V] added; −inf for tokens beyond W. Overwrites chances."""
    if weight != 1:
        # A weight of 0 would make NaN of impossible tokens.
        chances = torch.where(chances == NEG_INF, NEG_INF, weight * chances)
    words, width = chances.shape[1], scores.shape[1]
    steered = chances.add_(scores[:, :words])
    return steered if words == width else torch.nn.functional.pad(steered, (0, width - words), value=NEG_INF)
