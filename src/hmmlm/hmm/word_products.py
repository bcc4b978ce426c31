"""Transition and emission of a blocked HMM in one matrix per block: from its states to the next word."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hmmlm.numerics.logmatrix import LogMatrix

if TYPE_CHECKING:
    from hmmlm.hmm.blocked import BlockedHMM

_KEPT_CELLS = 2**25  # of all matrices kept, each in two forms: 256 MB in float32


class WordProducts:
    """log p(next word | state) of the states of a block, computed when needed; those used last are kept.

    The matrix of a block takes the product of its states with all others, a hundred times the cost of using it.
    """

    def __init__(self, hmm: BlockedHMM) -> None:
        self._hmm = hmm
        words = [block[block >= 0] for block in hmm.words_of_block]
        self._column = torch.cat(words).argsort()  # [V] of each word among those of all blocks, side by side
        self._emissions = [LogMatrix(hmm.factors.log_emission[own].t()) if len(own) else None for own in words]
        self._kept: OrderedDict[int, LogMatrix] = OrderedDict()

    def product(self, log_probs: Tensor, block: int) -> Tensor:
        """Compute log Σ_z p(z) p(next word | z) [n, V] for log_probs [n, k] over the states of a block."""
        matrix = self._kept.pop(block, None)
        if matrix is None:
            matrix = LogMatrix(self._next_words(block))
        self._kept[block] = matrix
        if len(self._kept) > max(1, _KEPT_CELLS // matrix.log_values.numel()):
            self._kept.popitem(last=False)
        return matrix.product(log_probs)

    def _next_words(self, block: int) -> Tensor:
        """Compute log p(next word | state) [k, V] for the states of a block."""
        factors, k = self._hmm.factors, self._hmm.states_per_block
        rows = slice(block * k, (block + 1) * k)
        u, normalizer = factors.u[rows], factors.log_normalizer[rows][:, None]
        targets = zip(factors.w.split(k), self._emissions, strict=True)
        moved = [(u @ w.t() - normalizer, emission) for w, emission in targets if emission is not None]
        by_block = torch.cat([emission.product(log_states) for log_states, emission in moved], 1)
        return by_block[:, self._column]
