"""The sums of `guided` for a model of two matrices on a CPU, in products of probabilities.

Arrays of the size of the states belong to NumPy, whose operations on small arrays take a tenth of the time of torch's;
those of the size of the vocabulary to torch, which has several threads. Where underflow may have changed a sum, there
is no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hmmlm.emissions import Categorical
from hmmlm.hmm.hmm import HMM
from hmmlm.ops.common import NEG_INF
from hmmlm.ops.underflow import FLOOR, least_sum
from hmmlm.scan.composition import matrices
from hmmlm.transitions import Dense

if TYPE_CHECKING:
    from hmmlm.constrain.guided import Plan

_SMALL = 64  # tokens of a class up to which these are scored one by one


def cpu_matrices(hmm: HMM) -> tuple[Dense, Categorical] | None:
    """Return the transition and the emission of a model of two matrices on a CPU; None for others."""
    there = matrices(hmm) is not None and hmm.device.type == "cpu"
    return (hmm.transition, hmm.emission) if there else None  # type: ignore[return-value]


def advance_products(
    transition: Dense, emission: Categorical, log_states: Tensor, tokens: Sequence[int]
) -> Tensor | None:
    """Compute `guided.advance_states`."""
    matrix, dtype = transition.matrix(), log_states.dtype
    joint = log_states.numpy() + emission.log_probs.numpy()[:, tokens].T
    peak = joint.max(1, keepdims=True)
    if not peak.min() > NEG_INF:
        return None
    probs = _exp(joint - peak, dtype)
    probs /= probs.sum(1, keepdims=True)
    moved = matrix.multiply(torch.from_numpy(probs)).numpy()
    if not moved.min() >= least_sum(transition.num_states, dtype):
        return None
    return torch.from_numpy(np.log(moved) + matrix.peak.numpy())


def accept_by_column(emission: Categorical, log_states: Tensor, plans: Sequence[Plan]) -> Tensor | None:
    """Compute log p(all accepted | next token) of the columns of emissions [m, U], for each row that tokens share."""
    states, matrix = log_states.numpy(), emission.matrix.matrix
    texts = [text for text, plan in enumerate(plans) for _ in plan.targets.rows]
    if not texts:
        return log_states.new_empty(0, len(matrix.peak))
    tables = np.concatenate([plan.table.numpy()[plan.targets.rows] for plan in plans])
    weights = np.concatenate([states, states[texts] + tables])
    tops = weights.max(1, keepdims=True)
    if not tops.min() > NEG_INF:
        return None
    sums = matrix.multiply(torch.from_numpy(_exp(weights - tops, log_states.dtype)))
    if not float(sums.amin()) >= least_sum(len(states[0]), log_states.dtype):
        return None
    # The largest entries of the columns cancel, and one logarithm is enough.
    count = len(states)
    plain = sums[:count] if texts == list(range(count)) else sums[texts]
    ratios = (sums[count:] / plain).log_().add_(torch.from_numpy(tops[count:] - tops[texts]))
    return ratios.contiguous()  # only now: a product that is stored by columns has twice the size


def accept_by_token(emission: Categorical, log_state: np.ndarray, plan: Plan) -> np.ndarray:
    """Compute log p(all accepted | next token) [n] of the tokens that are scored alone, from log_state [Z]."""
    tokens, rows = plan.targets.arrays
    plain = log_state[:, None] + emission.log_probs.numpy()[:, tokens]
    joint = plain + plan.table.numpy().T[:, rows]
    base, top = plain.max(0), joint.max(0)
    possible = top > NEG_INF
    if not possible.all():
        base[~possible] = top[~possible] = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.exp(joint - top).sum(0) / np.exp(plain - base).sum(0)
        return np.where(possible, np.log(ratios) + (top - base), NEG_INF)


class ClassProducts:
    """The columns of emissions in the order of the classes of their tokens, small classes first.

    Every token is then scored once, by a product with the row of its class: of a JSON string, the tokens of each length
    have a row of their own, and products of all rows with the whole vocabulary take five times longer.

    Args:
        tokens: [V] by class.
        sizes: [C] of the classes.
    """

    def __init__(self, emission: Categorical, tokens: Tensor, sizes: Tensor) -> None:
        self.by_size, pieces = sizes.argsort(stable=True).tolist(), tokens.split(sizes.tolist())
        order, column_of = torch.cat([pieces[each] for each in self.by_size]), emission.column_of_word
        self.tokens, self.sizes = order.numpy(), sizes.numpy()[self.by_size]
        self.starts = self.sizes.cumsum() - self.sizes
        self.small = int((self.sizes <= _SMALL).sum())  # classes
        self.columns = emission.matrix.matrix.scaled.index_select(1, order if column_of is None else column_of[order])

    def accept(self, states: np.ndarray, plans: Sequence[Plan], result: Sequence[np.ndarray]) -> bool:
        """Set log p(all accepted | next token) in result [n, V] of −inf; return whether no sum may have underflowed."""
        rows = np.stack([plan.targets.row_of_class.numpy() for plan in plans])[:, self.by_size]
        live, count = np.flatnonzero((rows >= 0).any(0)), len(states)
        if not len(live):
            return True
        if not all(len(plan.table) for plan in plans):
            return False
        rows, sizes, starts = rows[:, live], self.sizes[live], self.starts[live]
        weights, which = [states], np.empty_like(rows)
        for state, plan, own, place in zip(states, plans, rows, which, strict=True):
            distinct, index = np.unique(own, return_inverse=True)
            place[:] = index + sum(map(len, weights))
            weights.append(state + plan.table.numpy()[distinct])
        scores = np.concatenate(weights)
        tops = scores.max(1)
        if not tops.min() > NEG_INF:
            return False
        probs, ends = _exp(scores - tops[:, None], self.columns.dtype), sizes.cumsum()
        places = (starts - ends + sizes).repeat(sizes) + np.arange(ends[-1])
        sums = self.columns.new_empty(2 * count, len(places))
        small = int((live < self.small).sum())
        for number in range(small, len(live)):
            first, last = ends[number] - sizes[number], ends[number]
            columns = self.columns[:, starts[number] : starts[number] + sizes[number]]
            both = torch.from_numpy(probs[[*range(count), *which[:, number]]])
            torch.mm(both, columns, out=sums[:, first:last])
        if small:
            alone = self.columns.index_select(1, torch.from_numpy(places[: ends[small - 1]])).numpy()
            found, class_of = sums[:, : alone.shape[1]].numpy(), np.arange(small).repeat(sizes[:small])
            np.matmul(probs[:count], alone, out=found[:count])
            for joint, own in zip(found[count:], which, strict=True):
                np.einsum("zn,nz->n", alone, probs[own[class_of]], out=joint)
        if not float(sums.amin()) >= least_sum(len(self.columns), sums.dtype):
            return False
        # The largest entries of the columns cancel, and one logarithm is enough.
        values = sums[count:].div_(sums[:count]).log_().numpy()
        values += np.where(rows >= 0, tops[which] - tops[:count, None], NEG_INF).repeat(sizes, 1)
        for row, own in zip(result, values, strict=True):
            row[self.tokens[places]] = own
        return True


def accept_by_class(log_states: Tensor, plans: Sequence[Plan]) -> Tensor | None:
    """Compute `guided.log_probs_accept`."""
    states, of_classes = log_states.numpy(), dict[int, list[int]]()
    for number, plan in enumerate(plans):
        of_classes.setdefault(id(plan.targets.classes), []).append(number)
    result = log_states.new_full((len(plans), len(plans[0].targets.classes.tokens)), NEG_INF)
    for own in of_classes.values():
        products = plans[own[0]].targets.classes.products
        if not products.accept(states[own], [plans[n] for n in own], [result[n].numpy() for n in own]):
            return None
    return result


def _exp(relative: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return exp(relative), zero below FLOOR: denormal numbers are slow."""
    values: np.ndarray = np.exp(relative)
    values[values < FLOOR[dtype]] = 0.0
    return values
