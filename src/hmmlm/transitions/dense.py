"""A transition that is a matrix."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.numerics.support import Support
from hmmlm.ops.pieces import at_once
from hmmlm.transitions.tiled import TiledTransition
from hmmlm.transitions.tiles import entropy_of_sources

_LEAST = 1e-20  # scaled predictions below this make the entropy of origins inexact in products


class Dense(TiledTransition):
    """log A [Z, Z], row = from-state."""

    kind = "dense"
    TENSORS: ClassVar[dict[str, str]] = {"log_probs": "states, states"}
    keeps_matrix = True

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs = log_probs
        self._check()
        self._prepare()

    def log_block(self, rows: slice, columns: slice) -> Tensor:
        return self.log_probs[rows, columns]

    def log_entries(self, i: Tensor, j: Tensor) -> Tensor:
        cells = i * self.num_states + j
        return self.log_probs.flatten().index_select(0, cells.flatten()).view(cells.shape)

    def make_tiles(self, sources: Tensor, targets: Tensor, width: int) -> Tensor:
        return self.log_probs.view(-1, width, self.num_states // width, width)[sources, :, targets]

    def tile_gradient(self, sources: Tensor, targets: Tensor, counts: Tensor) -> dict[str, Tensor]:
        total, width = torch.zeros_like(self.log_probs), counts.shape[1]
        total.view(-1, width, self.num_states // width, width)[sources, :, targets] = counts
        return {"log_probs": total}

    def log_rows(self, states: Tensor) -> Tensor:
        return self.log_probs[states]

    def _into(self, states: Tensor) -> Tensor:
        return self.matrix().log_columns.index_select(0, states.flatten()).view(*states.shape, -1)

    def origin_entropy(self, log_probs: Tensor, source: Support = None, target: Support = None) -> Tensor:
        if source is None and target is None:
            return _entropy_of_origins(log_probs, self.matrix())
        return super().origin_entropy(log_probs, source, target)


def _entropy_of_origins(log_probs: Tensor, matrix: LogMatrix) -> Tensor:
    """Compute the entropy of the state before each state [n, Z], for log_probs [n, Z] before a step by a matrix [Z, Z].

    From two products, except where the prediction is too small for them. With f the distribution, A' the transition
    with each column divided by its largest entry and q' = f A': H_j = log q'_j − Σ_i f_i A'_ij (log f_i + log A'_ij) /
    q'_j.
    """
    probs = log_probs.exp()
    predicted = probs @ matrix.scaled
    mean = torch.xlogy(probs, probs) @ matrix.scaled + probs @ torch.xlogy(matrix.scaled, matrix.scaled)
    suspect = predicted < _LEAST
    result = torch.where(suspect, 0.0, predicted.log() - mean / predicted).clamp_min(0)
    for b in suspect.any(1).nonzero().flatten().tolist():
        for columns in suspect[b].nonzero().flatten().split(at_once(len(probs[b]))):
            result[b, columns] = entropy_of_sources(log_probs[b, None], matrix.log_values[:, columns])[0]
    return result
