"""Transition and emission of a blocked HMM in one matrix per block: from its states to the next word."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hmmlm.hmm.lattice import Lattice, continuing
from hmmlm.hmm.logmatrix import LogMatrix

if TYPE_CHECKING:
    from hmmlm.hmm.blocked import BlockedHMM

_PIECE_CELLS = 2**25  # of predictions that are computed together
_KEPT_CELLS = 2**25  # of all matrices kept, each in two forms: 256 MB in float32


class WordProducts:
    """log p(next word | state) of the states of a block, computed when needed; those used last are kept.

    The matrix of a block takes the product of its states with all others, a hundred times the cost of using it.
    """

    def __init__(self, hmm: BlockedHMM) -> None:
        self._hmm = hmm
        words = [block[block >= 0] for block in hmm.words_of_block]
        self._column = torch.cat(words).argsort()  # [V] of each word: matrices have the words of a block side by side
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
        return matrix.product(log_probs)[:, self._column]

    def predictions(self, lattice: Lattice) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield what `BlockedHMM.predictions` does, of the tokens after the first: each matrix is computed once."""
        steps = list(continuing(lattice, lattice.batch.active))
        if not steps:
            return
        order, active = lattice.batch.order, torch.tensor([rows for _, rows, _, _ in steps], device=self._column.device)
        step = torch.arange(1, len(steps) + 1, device=active.device).repeat_interleave(active)
        begins = (active.cumsum(0) - active).repeat_interleave(active)
        sequence = order[torch.arange(len(step), device=active.device) - begins]
        log_filtered = torch.cat([log_probs for _, _, log_probs, _ in steps])
        blocks = torch.cat([support.blocks for _, _, _, support in steps])
        for block in blocks.unique().tolist():
            rows = (blocks == block).nonzero().flatten()
            for piece in rows.split(max(1, _PIECE_CELLS // self._hmm.vocab_size)):
                yield sequence[piece], step[piece], self.product(log_filtered[piece], block)

    def _next_words(self, block: int) -> Tensor:
        """Compute log p(next word | state) [k, V] for the states of a block, words by block."""
        factors, k = self._hmm.factors, self._hmm.states_per_block
        rows = slice(block * k, (block + 1) * k)
        u, normalizer = factors.u[rows], factors.log_normalizer[rows][:, None]
        targets = zip(factors.w.split(k), self._emissions, strict=True)
        moved = [(u @ w.t() - normalizer, emission) for w, emission in targets if emission is not None]
        return torch.cat([emission.product(log_states) for log_states, emission in moved], 1)
