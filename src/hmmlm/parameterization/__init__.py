"""θ → distributional parameters (π, A, O): every way of making them behind one interface."""

from __future__ import annotations

import torch

from hmmlm.errors import InputError
from hmmlm.parameterization.base import Parameterization
from hmmlm.parameterization.scalar import Scalar

__all__ = ["Parameterization", "Scalar", "make_parameterization"]


def make_parameterization(
    kind: str, states: int, vocab_size: int, *, scale: float = 1.0, generator: torch.Generator | None = None
) -> Parameterization:
    """A new parameterization, by name; `generator` draws the initial values, on the CPU, alike on every device."""
    if kind == "scalar":
        return Scalar(states, vocab_size, scale, generator)
    raise InputError(f"unknown parameterization {kind!r}; known: scalar")
