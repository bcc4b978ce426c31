"""An emission that is a matrix: every state may emit every word."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from hmmlm.emissions.base import Emission
from hmmlm.emissions.columns import EmissionMatrix
from hmmlm.numerics.support import Support
from hmmlm.ops.common import logsumexp


class Categorical(Emission):
    """log O [Z, V]."""

    kind = "categorical"
    TENSORS: ClassVar[dict[str, str]] = {"log_probs": "states, words"}

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs = log_probs
        self._check()

    @property
    def vocab_size(self) -> int:
        return self.log_probs.shape[1]

    @cached_property
    def matrix(self) -> EmissionMatrix:
        """The matrix, prepared for products."""
        return EmissionMatrix(self.log_probs)

    def score(self, tokens: Tensor, missing: bool, log_missing: Tensor | None = None) -> tuple[Support, Tensor]:
        scores = self.log_probs.index_select(1, tokens.clamp(min=0) if missing else tokens).t().contiguous()
        if missing:
            explained = scores.new_zeros(()) if log_missing is None else log_missing
            scores = torch.where((tokens < 0)[:, None], explained, scores)
        return None, scores

    def word_log_probs(self, log_states: Tensor, words: Tensor | None = None) -> Tensor:
        if words is None:
            return self.matrix.product(log_states)
        return logsumexp(log_states[..., None] + self.log_probs.index_select(1, words), -2)

    def group_log_probs(self, group_of_word: Tensor, groups: int) -> Tensor:
        return self.matrix.group_sums(group_of_word, groups)

    def log_rows(self, states: Tensor) -> tuple[Tensor, Tensor]:
        words = torch.arange(self.vocab_size, device=self.device)
        return words.expand(len(states), -1), self.log_probs[states]

    def log_entries(self, states: Tensor, words: Tensor) -> Tensor:
        return self.log_probs.flatten().index_select(0, states * self.vocab_size + words)

    def dense(self) -> Tensor:
        return self.log_probs

    def gradient(self, tokens: Tensor, posterior: Tensor, support: Support) -> dict[str, Tensor]:
        by_word = posterior.new_zeros(self.vocab_size, self.num_states).index_add_(0, tokens, posterior)
        return {"log_probs": by_word.t()}

    @property
    def column_of_word(self) -> Tensor | None:
        return self.matrix.column_of

    def column_log_probs(self, log_states: Tensor) -> Tensor:
        return self.matrix.matrix.product(log_states)
