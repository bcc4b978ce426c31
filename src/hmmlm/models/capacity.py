"""The width of a network with a given number of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from hmmlm.errors import InputError

FINE = 128  # narrower models may have any width, wider ones multiples of 8, which suit tensor cores


def transformer_layers(capacity: int) -> int:
    """Return the depth of a transformer: 2 blocks, and 2 more for each doubling of the capacity beyond 2^22."""
    return 2 + 2 * max(0, round(math.log2(capacity)) - 22)


def fit_width(make: Callable[[int], nn.Module], target: int, step: int, what: str) -> int:
    """Return the width whose number of parameters, word table included, is nearest to `target`.

    Any width below 128, multiples of 8 from there on; always multiples of `step`.

    Args:
        make: creates a model of a width.
        what: names the model in errors.
    """

    def count(width: int) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in make(width).parameters())

    # Weights are h × h or h × something: the number is c2 w² + c1 w + c0 in the width, which three counts determine.
    one, two, three = (count(i * step) for i in (1, 2, 3))
    c2 = (three - 2 * two + one) / 2
    c1 = two - one - 3 * c2
    c0 = one - c1 - c2
    if target < one:
        raise InputError(f"a capacity of {target:,} is below the {one:,} parameters of the smallest model of {what}")
    if one == two:
        raise InputError("a capacity sets the width of what is factored, and nothing is: leave out capacity")
    exact = step * ((c1**2 + 4 * c2 * (target - c0)) ** 0.5 - c1) / (2 * c2) if c2 else step * (target - c0) / c1
    grain = step if exact < FINE else math.lcm(8, step)
    below = max(grain, int(exact // grain) * grain)
    return min((below, below + grain), key=lambda width: abs(count(width) - target))
