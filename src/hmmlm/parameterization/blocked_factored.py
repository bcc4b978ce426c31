"""The reparameterizations of Lee & Berg-Kirkpatrick 2025 on the blocks of Chiu & Rush 2020."""

from __future__ import annotations

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.ops.blocked_emission import blocked_emission
from hmmlm.ops.linear_logsumexp import linear_logsumexp
from hmmlm.parameterization.blocked_base import FromFactors
from hmmlm.parameterization.dense_networks import Transformer
from hmmlm.parameterization.factored import Factored
from hmmlm.structure.blocks import Blocks


class BlockedFactored(FromFactors):
    """H_in, H_out, H_emit of a `Factored` model of the same size, of which a batch computes only the states it keeps.

    Everything is factored, and networks are perceptrons: a transformer over the states would see others with every
    sample of them.
    """

    def __init__(self, blocks: Blocks, dense: Factored, dropout: float = 0.5) -> None:
        super().__init__(blocks, dropout)
        if not all(dense.factored.values()):
            free = ", ".join(name for name, factored in dense.factored.items() if not factored)
            raise InputError(f"blocked models are factored throughout, and {free} is not: factor it, or use no blocks")
        if any(isinstance(network, Transformer) for network in dense.networks):
            raise InputError("a transformer looks at all states at once, and blocked models at some: use linear or mlp")
        self.dense = dense

    def parts(self, states: Tensor | None, carried: Tensor | None = None) -> tuple[Tensor, ...]:
        u, w, emitting = self.dense.features(states)
        log_start = torch.log_softmax(u @ self.dense.start, 0, dtype=self.dense.start.dtype)
        blocked = emitting.reshape(self.blocks.num_blocks, -1, emitting.shape[1])
        log_emission = blocked_emission(blocked, self.dense.emission, None, self.tiles)
        before: list[Tensor] = []
        if carried is not None:
            rows = self.dense.features(carried)[0]
            before = [rows, linear_logsumexp(rows, w)]
        return u, w, linear_logsumexp(u, w), log_start, log_emission, *before
