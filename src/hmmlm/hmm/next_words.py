"""The probabilities of the next word at every position of a batch, of a blocked HMM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hmmlm.hmm.lattice import Lattice, continuing
from hmmlm.hmm.protocol import Predictions
from hmmlm.ops.common import exp

if TYPE_CHECKING:
    from hmmlm.hmm.blocked import BlockedHMM

_CELLS = 2**25  # of predictions that are computed together


def next_words(hmm: BlockedHMM, lattice: Lattice, words: Tensor | None) -> Iterator[Predictions]:
    """Yield what `BlockedHMM.predictions` does, of the tokens after the first.

    Rows after words of one block share a matrix, which is computed once.
    """
    steps = list(continuing(lattice, lattice.batch.active))
    if not steps:
        return
    device, order = hmm.device, lattice.batch.order
    active = torch.tensor([rows for _, rows, _, _ in steps], device=device)
    step = torch.arange(1, len(steps) + 1, device=device).repeat_interleave(active)
    begins = (active.cumsum(0) - active).repeat_interleave(active)
    sequence = order[torch.arange(len(step), device=device) - begins]
    filtered = exp(torch.cat([log_probs for _, _, log_probs, _ in steps]))
    possible, observed = filtered.amax(1) > 0, torch.cat(lattice.log_scales[1:])
    blocks = torch.cat([support.blocks for _, _, _, support in steps])
    emission = _Emission(hmm, words)
    for block in blocks.unique().tolist():
        rows, matrix = (blocks == block).nonzero().flatten(), emission.after(block)
        for piece in rows.split(max(1, _CELLS // len(matrix))):
            probs = filtered[piece] @ matrix.t()
            yield Predictions(sequence[piece], step[piece], possible[piece], observed[piece], probs)


class _Emission:
    """Probabilities of words [W] (None: all) given states, in products of probabilities: what underflows is zero."""

    def __init__(self, hmm: BlockedHMM, words: Tensor | None) -> None:
        factors = hmm.factors
        chosen = torch.arange(hmm.vocab_size, device=hmm.device) if words is None else words
        by_block, order = factors.block_of_word[chosen].sort(stable=True)
        self._hmm, self._place = hmm, order.argsort()
        counts = by_block.bincount(minlength=hmm.blocks).tolist()
        self._probs = exp(factors.log_emission[chosen[order]]).split(counts)  # of each block [its words, k]

    def after(self, block: int) -> Tensor:
        """Compute p(next word | state) [W, k] for the states of a block."""
        factors, k = self._hmm.factors, self._hmm.states_per_block
        rows = self._hmm.span(block)
        moved = exp(factors.w @ factors.u[rows].t() - factors.log_normalizer[rows]).split(k)
        return torch.cat([p @ to for p, to in zip(self._probs, moved, strict=True)]).index_select(0, self._place)
