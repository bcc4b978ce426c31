"""The states of words: the long-run use of each state, and p(state | word) as an embedding of the word."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm import HMM

MAX_STATES = 8_192  # the transition and emission matrices are held dense, in float64


class LongRun(NamedTuple):
    """A chain and its stationary distribution."""

    hmm: HMM  # dense, float64, on the CPU
    transition: Tensor  # [Z, Z] p(next state | state); restarts are included
    mass: Tensor  # [Z] stationary distribution: the long-run share of tokens that each state emits


@torch.no_grad()
def long_run(hmm: HMM, restart_after: int | None) -> LongRun:
    """Compute the stationary distribution of a model; after the token `restart_after` it starts again."""
    if hmm.num_states > MAX_STATES:
        raise InputError(f"{hmm.num_states:,} states are too many to explain: the limit is {MAX_STATES:,}")
    dense = hmm.dense().to("cpu", torch.float64)
    start, transition = dense.log_start.exp(), dense.transition.dense().exp()
    if restart_after is not None:  # the start distribution follows, whatever the transition matrix holds
        ends = dense.emission.dense()[:, restart_after, None].exp()
        transition = ends * start + (1 - ends) * transition
    return LongRun(dense, transition, stationary(start, transition))


def stationary(start: Tensor, transition: Tensor) -> Tensor:
    """Return the stationary distribution [Z] (float64) that the chain reaches from `start` [Z].

    Iterates x ← x · ε (1 − (1 − ε) A)⁻¹, the distribution after a geometric number of steps with mean 1/ε = 10⁶.
    Periodic chains converge, and where A has several stationary distributions the result is the one that `start` leads
    to. A chain that needs more than about 10⁸ steps to mix yields its distribution after that many.
    """
    start, transition = start.double(), transition.double()
    transition = transition / transition.sum(1, keepdim=True)  # a row sum of 1 + 10⁻⁷ would grow over 10⁶ steps
    factors = torch.linalg.lu_factor(torch.eye(len(start), dtype=start.dtype) - (1 - 1e-6) * transition.T)
    mass = start / start.sum()
    for _ in range(100):
        updated = torch.linalg.lu_solve(*factors, mass[:, None])[:, 0].clamp_min(0)
        updated = updated / updated.sum()
        converged = bool((updated - mass).abs().sum() < 1e-9)
        mass = updated
        if converged:
            break
    return mass


def states_of_words(chain: LongRun) -> Tensor:
    """Compute p(state | word) [V, Z] of a word somewhere in a long text; zero for a word of probability zero."""
    joint = chain.hmm.emission.dense().exp().mul_(chain.mass[:, None]).t()
    return joint / joint.sum(1, keepdim=True).clamp_min(torch.finfo(joint.dtype).tiny)
