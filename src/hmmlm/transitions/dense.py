"""A transition that is a matrix."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hmmlm.numerics.support import Support
from hmmlm.transitions.origins import entropy_of_origins
from hmmlm.transitions.tiled import TiledTransition


class Dense(TiledTransition):
    """log A [Z, Z], row = from-state."""

    kind = "dense"
    TENSORS: ClassVar[dict[str, str]] = {"log_probs": "states, states"}
    keeps_matrix = True

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs = log_probs
        self._check()
        self._prepare()

    @property
    def num_states(self) -> int:
        return len(self.log_probs)

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
            return entropy_of_origins(log_probs, self.matrix(), self.matrix().log_columns)
        return super().origin_entropy(log_probs, source, target)
