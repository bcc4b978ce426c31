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


def _exp(relative: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return exp(relative), zero below FLOOR: denormal numbers are slow."""
    values: np.ndarray = np.exp(relative)
    values[values < FLOOR[dtype]] = 0.0
    return values
