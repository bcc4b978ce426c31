"""The transition of a union of HMMs: the chain stays in the component in which it starts."""

from __future__ import annotations

import torch
from torch import Tensor

from hmmlm.numerics.semirings import LOG, Semiring
from hmmlm.numerics.support import Support, spans
from hmmlm.numerics.tables import UnionTables
from hmmlm.ops.common import NEG_INF, logsumexp
from hmmlm.transitions.base import Transition


class BlockDiagonal(UnionTables[Transition], Transition):
    """The transitions of the components side by side."""

    def log_block(self, rows: slice, columns: slice) -> Tensor:
        whole = torch.full((self.num_states, self.num_states), NEG_INF, dtype=self.dtype, device=self.device)
        for part, span in zip(self.parts, spans(self.sizes), strict=True):
            whole[span, span] = part.dense()
        return whole[rows, columns]

    def log_entries(self, i: Tensor, j: Tensor) -> Tensor:
        result = torch.full(torch.broadcast_shapes(i.shape, j.shape), NEG_INF, dtype=self.dtype, device=self.device)
        for (part, left, own_i), (_, entered, own_j) in zip(self._locate(i), self._locate(j), strict=True):
            result = torch.where(left & entered, part.log_entries(own_i, own_j), result)
        return result

    def forward_step(self, ring: Semiring, x: Tensor, source: Support = None, target: Support = None) -> Tensor:
        moved = []
        for (part, own, inner), (_, _, outer) in zip(self.split(x, source), self.split(None, target), strict=True):
            mass = _mass(own) if ring is LOG else None  # a component expects distributions, or nothing at all
            step = part.forward_step(ring, own if mass is None else own - mass, inner, outer)
            moved.append(step if mass is None else step + mass)
        return torch.cat(moved, 1)

    def backward_step(self, ring: Semiring, y: Tensor, source: Support = None, target: Support = None) -> Tensor:
        pairs = zip(self.split(y, target), self.split(None, source), strict=True)
        return torch.cat(
            [part.backward_step(ring, own, outer, inner) for (part, own, inner), (_, _, outer) in pairs], 1
        )

    def origin_entropy(self, log_probs: Tensor, source: Support = None, target: Support = None) -> Tensor:
        pairs = zip(self.split(log_probs, source), self.split(None, target), strict=True)
        found = [part.origin_entropy(own - _mass(own), inner, to) for (part, own, inner), (_, _, to) in pairs]
        return torch.cat(found, 1)

    def log_rows(self, states: Tensor) -> Tensor:
        result = torch.full((len(states), self.num_states), NEG_INF, dtype=self.dtype, device=self.device)
        for (part, inside, own), span in zip(self._locate(states), spans(self.sizes), strict=True):
            result[inside, span] = part.log_rows(own[inside])
        return result

    def log_columns(self, states: Tensor, source: Support = None) -> Tensor:
        pairs = zip(self._locate(states), self.split(None, source), strict=True)
        found = [(inside, part.log_columns(own, origin)) for (part, inside, own), (_, _, origin) in pairs]
        return torch.cat([values.masked_fill(~inside[..., None], NEG_INF) for inside, values in found], -1)


def _mass(log_probs: Tensor) -> Tensor:
    """Return the log-mass [n, 1] of rows, finite."""
    return logsumexp(log_probs, 1)[:, None].clamp_min(torch.finfo(log_probs.dtype).min)
