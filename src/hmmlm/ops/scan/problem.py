"""Inputs of the dense scan.

Shapes: B sequences, T positions, Z states, V words. `restart[b, t]`: position t is drawn from the start distribution
regardless of the preceding tokens. `carry[b]`: log p(z at the token before position 0 | all tokens before).
`future[b]`: log p(later tokens | z at the last one) / p(later tokens | all tokens so far), by which the counts, and so
the gradient, are those of the whole text; only impl "scaled" has it.
"""

from typing import NamedTuple

from torch import Tensor


class Parameters(NamedTuple):
    """Distributional parameters, as log-probabilities."""

    log_start: Tensor  # [Z]
    log_transition: Tensor  # [Z, Z] row = from-state
    log_emission: Tensor  # [Z, V]


class Evidence(NamedTuple):
    """A batch of observations."""

    tokens: Tensor  # [B, T] integer; -1 is missing
    lengths: Tensor | None = None  # [B]
    carry: Tensor | None = None  # [B, Z] float64
    restart: Tensor | None = None  # [B, T] bool
    future: Tensor | None = None  # [B, Z] float64
