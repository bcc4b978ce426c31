"""Results of queries."""

from typing import Any, NamedTuple

from torch import Tensor

from hmmlm.ops.common import Carry


class Filtered(NamedTuple):
    """Result of filtering: the distribution of the state given the tokens so far."""

    log_likelihood: Tensor  # [B]
    carry: Carry
    """For the next window of the same sequences."""
    probs: Tensor  # [B, T, Z] p(z_t | x_1..t); zero beyond a sequence's length


class Predictions(NamedTuple):
    """p(next word | words before) at some positions of a batch."""

    sequence: Tensor  # [n]
    step: Tensor  # [n] t, from 0
    possible: Tensor  # [n] bool, whether the words before are possible
    log_observed: Tensor  # [n] log p(x_t | x_1..t−1) of the word there; −inf from an impossible one on
    probs: Tensor  # [n, W] p(x_t = v | x_1..t−1) of words v; zero after an impossible word


class Counts(NamedTuple):
    """Expected counts under the posterior, summed over the batch (the E step of Baum-Welch)."""

    start: Tensor  # [Z]
    transition: Any
    """[Z, Z] of a dense transition, and of a factored one (sparse if emissions are blocked); of others a dictionary
    with the counts of each factor."""
    emission: Any
    """[Z, V] of a categorical emission, [V, k] of a blocked one."""
    log_likelihood: Tensor  # [] of all sequences
