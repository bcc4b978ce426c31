"""Transition and emission of a blocked HMM in one matrix per block: from its states to the next word."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hmmlm.emissions import Blocked
from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.ops.pieces import at_once

if TYPE_CHECKING:
    from hmmlm.scan.composition import Composition

_KEPT = 2**25  # cells of the matrices that are kept, each in two forms: 256 MB in float32


class WordProducts:
    """log p(next word | state) of the states of a block, computed when needed; those used last are kept.

    The matrix of a block takes the product of its states with all others, a hundred times the cost of using it.
    """

    def __init__(self, hmm: Composition) -> None:
        assert isinstance(hmm.emission, Blocked)
        self._transition, self._width = hmm.transition, hmm.emission.width
        words = [block[block >= 0] for block in hmm.emission.words_of_block]
        self._column = torch.cat(words).argsort()  # [V] of each word among those of all blocks, side by side
        self._emissions = [LogMatrix(hmm.emission.log_probs[own].t()) if len(own) else None for own in words]
        self._kept: OrderedDict[int, LogMatrix] = OrderedDict()

    def product(self, log_probs: Tensor, block: int) -> Tensor:
        """Compute log Σ_z p(z) p(next word | z) [n, V] for log_probs [n, k] over the states of a block."""
        matrix = self._kept.pop(block, None)
        if matrix is None:
            matrix = LogMatrix(self._next_words(block))
        self._kept[block] = matrix
        if len(self._kept) > at_once(matrix.log_values.numel(), _KEPT):
            self._kept.popitem(last=False)
        return matrix.product(log_probs)

    def _next_words(self, block: int) -> Tensor:
        """Compute log p(next word | state) [k, V] for the states of a block."""
        rows = slice(block * self._width, (block + 1) * self._width)
        moved = self._transition.log_block(rows, slice(None)).split(self._width, 1)
        found = [emission.product(each) for each, emission in zip(moved, self._emissions, strict=True) if emission]
        return torch.cat(found, 1)[:, self._column]
