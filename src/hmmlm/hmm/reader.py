"""The filter of several sequences, one token at a time, over the states of their last tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hmmlm.hmm.hmm import HMM
from hmmlm.numerics.semirings import LOG
from hmmlm.numerics.support import Support, restrict, state_ids
from hmmlm.scan.lattice import condition


@dataclass(frozen=True)
class Reader:
    """Sequences after at least one token each; `HMM.advance` takes states of the next token instead.

    The states that can emit the last token are few in a blocked HMM, the states of the next token are all.
    """

    hmm: HMM
    tokens: Tensor  # [n] the last tokens
    log_filtered: Tensor  # [n, K] log p(z | tokens so far), over the states that can emit the last token

    @staticmethod
    def start(hmm: HMM, tokens: Tensor) -> tuple[Tensor, Reader]:
        """Return log p(x_1) [n] of first tokens [n], and the sequences."""
        support, scores = hmm.emission.score(tokens, False)
        return _read(hmm, tokens, restrict(hmm.log_start.expand(len(tokens), -1), support), scores)

    def read(self, tokens: Tensor) -> tuple[Tensor, Reader]:
        """Return log p(x_t | x_1..t−1) [n] of the next tokens [n], and the sequences with them."""
        target, scores = self.hmm.emission.score(tokens, False)
        predicted = self.hmm.transition.forward_step(LOG, self.log_filtered, self.support, target)
        return _read(self.hmm, tokens, predicted, scores)

    def next_tokens(self) -> Tensor:
        """Compute log p(next token = v) [n, V]."""
        return self.hmm._predict(self.log_filtered, self.support)

    def states(self, index: Tensor) -> Tensor:
        """Return the states at positions `index` [n] of `log_filtered`."""
        return state_ids(self.support, index)

    def rows(self, rows: Tensor) -> Reader:
        """Return some of the sequences: a mask, or indices, which may repeat."""
        return Reader(self.hmm, self.tokens[rows], self.log_filtered[rows])

    @property
    def support(self) -> Support:
        """The states that can emit the last tokens."""
        return self.hmm.emission.score(self.tokens, False)[0]


@torch.no_grad()
def read_context(hmm: HMM, context: Sequence[int]) -> Reader | None:
    """Return one sequence after the tokens of `context`; None if there are none."""
    reader: Reader | None = None
    for token in torch.tensor(list(context), dtype=torch.long, device=hmm.device)[:, None]:
        reader = (Reader.start(hmm, token) if reader is None else reader.read(token))[1]
    return reader


def _read(hmm: HMM, tokens: Tensor, predicted: Tensor, scores: Tensor) -> tuple[Tensor, Reader]:
    log_filtered, log_prob = condition(LOG, predicted, scores)
    return log_prob, Reader(hmm, tokens, log_filtered)
