"""What the inference operations return."""

from typing import NamedTuple

from torch import Tensor


class Scan(NamedTuple):
    """The forward recursion: how likely each sequence is and where it left the chain."""

    log_likelihood: Tensor  # [B] natural log; differentiable in the parameters
    final: Tensor  # [B, Z] p(z at the last token | all tokens), detached
    suspect: Tensor | None = None
    """[B] bool, True only inside a CUDA graph, where a sequence whose mass underflows cannot be done again: those have
    no gradient, a likelihood not to be used, and the start distribution as `final`."""


class Filtered(NamedTuple):
    """Filtering: what is known of the state as the tokens come in."""

    log_likelihood: Tensor  # [B]
    final: Tensor  # [B, Z] the filtered distribution at the last token
    probs: Tensor  # [B, T, Z] p(z_t | x_1..t); zero beyond a sequence's length


class Counts(NamedTuple):
    """Expected counts under the posterior, summed over the batch: the E step of Baum-Welch."""

    start: Tensor  # [Z]
    transition: Tensor  # [Z, Z]
    emission: Tensor  # [Z, V]
    log_likelihood: Tensor  # [] of all sequences
