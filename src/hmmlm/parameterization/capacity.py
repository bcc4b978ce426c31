"""Dense reparameterizations by name, and by the number of parameters they should have."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch

from hmmlm.errors import InputError
from hmmlm.parameterization.dense_networks import Mlp, MlpForm, Skip, Transformer
from hmmlm.parameterization.factored import Factored

Dense = Literal["linear", "mlp", "transformer"]
FINE = 128  # narrower models may have any width, wider ones multiples of 8, as tensor cores like


def make_dense(
    kind: Dense, states: int, vocab_size: int, *, hidden: int = 256, capacity: int | None = None,
    layers: int | None = None, heads: int | None = None, skip: Skip = "activation", relu: bool = True,
    norm: bool = True, **options: Any,
) -> Factored:  # fmt: skip
    """A `Factored` with the networks of one kind; with `capacity`, as wide (and deep) as has about so many parameters.

    `layers`, `skip`, `relu` and `norm` are those of `MlpForm`; `layers` and `heads` those of `Transformer`; the rest
    goes to `Factored`. Depth, where `layers` is not given: two linear layers; two transformer blocks, and with a
    capacity two more for each doubling beyond 2^22, which keeps the width near 64 a block.
    """
    if capacity is not None:
        named = {"heads": heads, "skip": skip, "relu": relu, "norm": norm}
        layers = layers or default_layers(kind, capacity)
        hidden = fit_width(kind, capacity, states, vocab_size, layers=layers, **named, **options)
    network: Any = None
    if kind == "mlp":
        network = partial(Mlp, hidden, MlpForm(layers or 2, skip, relu, norm))
    elif kind == "transformer":
        network = partial(Transformer, hidden, layers or 2, heads)
    return Factored(states, vocab_size, hidden, make_network=network, **options)


def default_layers(kind: Dense, capacity: int) -> int:
    """Depth of a network with so many parameters in all."""
    return 2 + 2 * max(0, round(math.log2(capacity)) - 22) if kind == "transformer" else 2


def fit_width(kind: Dense, target: int, states: int, vocab_size: int, **options: Any) -> int:
    """The width whose number of parameters, word table and all, is nearest to `target`.

    Any width below 128, multiples of 8 from there on; multiples of `heads` where they are given.
    """
    heads = options.get("heads") or 1
    options = {**options, "generator": None, "initial": "normal"}  # nothing is drawn or scaled, only counted

    def count(width: int) -> int:
        with torch.device("meta"):
            made = make_dense(kind, states, vocab_size, hidden=width, **options)
        return sum(parameter.numel() for parameter in made.parameters())

    # weights are h × h or h × something: the number is c2 w² + c1 w + c0 in the width, which three counts determine
    one, two, three = (count(i * heads) for i in (1, 2, 3))
    c2 = (three - 2 * two + one) / 2
    c1 = two - one - 3 * c2
    c0 = one - c1 - c2
    if target < one:
        raise InputError(
            f"a capacity of {target:,} is below the smallest {kind} model of {states} states and {vocab_size:,} words, "
            f"which has {one:,} parameters"
        )
    if one == two:
        raise InputError("a capacity is reached by the width of what is factored, and nothing is")
    exact = heads * ((c1**2 + 4 * c2 * (target - c0)) ** 0.5 - c1) / (2 * c2) if c2 else heads * (target - c0) / c1
    step = heads if exact < FINE else math.lcm(8, heads)
    below = max(step, int(exact // step) * step)
    return min((below, below + step), key=lambda width: abs(count(width) - target))
