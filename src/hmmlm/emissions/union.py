"""The emission of a union of HMMs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hmmlm.emissions.base import Emission
from hmmlm.errors import InputError
from hmmlm.numerics.support import Support, UnionSupport
from hmmlm.numerics.tables import UnionTables
from hmmlm.ops.common import NEG_INF


class UnionEmission(UnionTables[Emission], Emission):
    """The emissions of the components side by side.

    A word has states in every component, whatever the blocks of each.
    """

    def __init__(self, parts: Sequence[Emission]) -> None:
        super().__init__(parts)
        for i, part in enumerate(self.parts):
            if part.vocab_size != self.vocab_size:
                raise InputError(
                    f"component {i} has {part.vocab_size} words and component 0 {self.vocab_size}: a union needs one "
                    "vocabulary"
                )

    @property
    def vocab_size(self) -> int:
        return self.parts[0].vocab_size

    def score(self, tokens: Tensor, missing: bool, log_missing: Tensor | None = None) -> tuple[Support, Tensor]:
        explained = [None] * len(self.parts) if log_missing is None else list(log_missing.split(self.sizes))
        found = [part.score(tokens, missing, own) for part, own in zip(self.parts, explained, strict=True)]
        supports, scores = zip(*found, strict=True)
        return UnionSupport(supports, tuple(score.shape[1] for score in scores), self.sizes), torch.cat(scores, 1)

    def word_log_probs(self, log_states: Tensor, words: Tensor | None = None) -> Tensor:
        parts = zip(self.parts, log_states.split(self.sizes, -1), strict=True)
        return torch.stack([part.word_log_probs(own, words) for part, own in parts]).logsumexp(0)

    def group_log_probs(self, group_of_word: Tensor, groups: int) -> Tensor:
        return torch.cat([part.group_log_probs(group_of_word, groups) for part in self.parts], 1)

    def log_rows(self, states: Tensor) -> tuple[Tensor, Tensor]:
        found = [(inside, *part.log_rows(own[inside])) for part, inside, own in self._locate(states)]
        width = max(log_probs.shape[1] for _, _, log_probs in found)
        words = torch.full((len(states), width), -1, device=self.device)
        result = torch.full(words.shape, NEG_INF, dtype=self.dtype, device=self.device)
        for inside, own, log_probs in found:
            words[inside, : own.shape[1]], result[inside, : own.shape[1]] = own, log_probs
        return words, result

    def log_entries(self, states: Tensor, words: Tensor) -> Tensor:
        result = torch.full(states.shape, NEG_INF, dtype=self.dtype, device=self.device)
        for part, inside, own in self._locate(states):
            result = torch.where(inside, part.log_entries(own, words), result)
        return result

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts])

    def gradient(self, tokens: Tensor, posterior: Tensor, support: Support) -> dict[str, Tensor]:
        found = enumerate(self.split(posterior, support))
        return {
            f"{i}.{name}": value
            for i, (part, own, inner) in found
            for name, value in part.gradient(tokens, own, inner).items()
        }
