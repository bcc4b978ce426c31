"""The kinds of transitions and emissions of the contract suite: how to make one, and its matrix by definition."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.emissions import Blocked, Categorical, Emission
from hmmlm.transitions import Dense, Factored, LowRank, Monarch, Transition

STATES, WORDS, WIDTH = 6, 7, 2
BLOCK_OF_WORD = torch.tensor([0, 1, 2, 0, 1, 2, 0])

Rows = Callable[..., Tensor]
"""Draws log-distributions over the last dimension, of a shape."""


class TransitionKind(NamedTuple):
    make: Callable[[Rows], Transition]  # of STATES states
    dense: Callable[[Transition], Tensor]  # log A [Z, Z], written out


class EmissionKind(NamedTuple):
    make: Callable[[Rows], Emission]
    dense: Callable[[Emission], Tensor]  # log O [Z, V], written out


def _factored(rows: Rows) -> Factored:
    u, w = (rows(STATES, 3).clamp(min=-3) for _ in range(2))  # the products of larger ones are not exact in float32
    return Factored(u, w)


def _dense_factored(transition: Transition) -> Tensor:
    assert isinstance(transition, Factored)
    return transition.u @ transition.w.t() - transition.log_normalizer[:, None]


def _dense_low_rank(transition: Transition) -> Tensor:
    assert isinstance(transition, LowRank)
    return (transition.log_left[:, :, None] + transition.log_right).logsumexp(1)


def _dense_monarch(transition: Transition) -> Tensor:
    assert isinstance(transition, Monarch)
    left, right = transition.log_left, transition.log_right
    return (left[:, :, None, :] + right.permute(1, 2, 0)[:, None]).reshape(STATES, STATES)  # from (i, j) to (i', k)


def _blocked(rows: Rows) -> Blocked:
    log_probs = torch.cat([rows(WIDTH, int((block == BLOCK_OF_WORD).sum())).t() for block in range(STATES // WIDTH)])
    order = torch.cat([(block == BLOCK_OF_WORD).nonzero()[:, 0] for block in range(STATES // WIDTH)])
    return Blocked(log_probs[order.argsort()], BLOCK_OF_WORD, STATES // WIDTH)


def _dense_blocked(emission: Emission) -> Tensor:
    assert isinstance(emission, Blocked)
    rows = []
    for state in range(emission.num_states):
        inside = emission.block_of_word == state // emission.width
        rows.append(torch.where(inside, emission.log_probs[:, state % emission.width], -torch.inf))
    return torch.stack(rows)


TRANSITIONS = {
    "dense": TransitionKind(lambda rows: Dense(rows(STATES, STATES)), lambda own: own.tensors()["log_probs"]),
    "factored": TransitionKind(_factored, _dense_factored),
    "low-rank": TransitionKind(lambda rows: LowRank(rows(STATES, 3), rows(3, STATES)), _dense_low_rank),
    "monarch": TransitionKind(lambda rows: Monarch(rows(3, 2, 2), rows(2, 3, 3)), _dense_monarch),
}
EMISSIONS = {
    "categorical": EmissionKind(lambda rows: Categorical(rows(STATES, WORDS)), lambda own: own.tensors()["log_probs"]),
    "blocked": EmissionKind(_blocked, _dense_blocked),
}
