"""Components of a mixture that follow the words of the text so far, the recent ones most.

A word i words ago has the weight 2^(−i / half-life). `RecentPredictor` predicts the words that followed the last words
before (a cache of trigrams), `AdaptedHmmPredictor` is an HMM whose words become as frequent as they have been recently
(the dynamic marginals of Kneser, Peters and Klakow 1997).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hmmlm.arguments import check_arguments
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.errors import InputError
from hmmlm.hmm.checks import check_count, padded
from hmmlm.text.lm import LanguageModel, length_batches
from hmmlm.text.predictors import HmmContext, HmmPredictor, Predictor

ORDER = 3
"""Words of the longest sequences that are found again, the predicted one included."""
MAX_HALF_LIFE = 100_000
_PRIOR = 0.5  # weight of shorter sequences, in occurrences
_SHARE = 0.3  # of the recent frequencies in the frequencies that an HMM adapts to
_HALVES = 8  # half-lives after which a word is forgotten: its weight is 1/256
_CELLS = 2**22  # of a piece: tokens × recent words
_TOKENS = 2**19  # that an HMM reads together, so that what its blocks share is computed once

Tokens = Sequence[int]


class _Recency:
    """The weights of the last words of a text."""

    def __init__(self, half_life: int) -> None:
        check_count("half_life", half_life, 1, MAX_HALF_LIFE)
        self.half_life, self.size = half_life, _HALVES * half_life
        self.weights = torch.exp2(-torch.arange(self.size, dtype=torch.float64) / half_life).flip(0)  # oldest first
        self.totals = torch.nn.functional.pad(self.weights.flip(0).cumsum(0), (1, 0))  # of the last 0, 1, … words

    def histories(self, tokens: Tensor, more: int = 0) -> Tensor:
        """Return the last size + `more` words before each token of a text [N], and before the one after it.

        The result is a view [N + 1, size + more], oldest word first; −1 before the text.
        """
        size = self.size + more
        return torch.nn.functional.pad(tokens, (size, 0), value=-1).unfold(0, size, 1)

    def remember(self, context: list[int], token: int, more: int = 0) -> list[int]:
        return [*context, token][-(self.size + more) :]


class RecentPredictor(Predictor):
    """The words that followed the last two words recently, interpolated with those after the last one, and with all.

    p_k(w) = (c_k(w) + m p_k−1(w)) / (Σ_w c_k(w) + m), where c_k(w) is the weight of w after the last k − 1 words and
    p_1 the share of w among recent words. Before the first token every word is as likely.
    """

    kind = "recent"

    @check_arguments
    def __init__(self, half_life: int, vocab_size: int) -> None:
        check_count("vocab_size", vocab_size, 1)
        self.recency, self.vocab_size = _Recency(half_life), vocab_size

    def token_log_probs(self, encoded: Sequence[Tokens]) -> list[Tensor]:
        return [self._log_probs(torch.tensor(tokens, dtype=torch.int32)) for tokens in encoded]

    def _log_probs(self, tokens: Tensor) -> Tensor:
        histories = self.recency.histories(tokens, ORDER - 1)[:-1]
        pieces = tokens.split(max(1, _CELLS // self.recency.size))
        begins = np.cumsum([0] + [len(piece) for piece in pieces])
        found = [
            self._interpolate(histories[begin : begin + len(piece)], piece)
            for begin, piece in zip(begins, pieces, strict=False)
        ]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *found]).log()

    def _interpolate(self, histories: Tensor, words: Tensor | None = None) -> Tensor:
        """Compute the probability of a word [n] after each history [n, size + ORDER − 1]; without words, of all [n, V].

        Of recent words only those that matter are looked up: a few per cent.
        """
        size, recent = self.recency.size, histories[:, ORDER - 1 :]
        known = (recent >= 0).sum(1)
        rows, columns = (recent >= 0 if words is None else recent == words[:, None]).nonzero(as_tuple=True)
        found = self._sum(recent, rows, columns, words)
        column = (-1,) if words is not None else (-1, 1)
        total, prior = self.recency.totals[known].view(column), (known == 0).double().view(column)
        probs = (found + prior / self.vocab_size) / (total + prior)
        for k in range(1, ORDER):
            last = histories[:, size + ORDER - 1 - k]
            if k == 1:  # before the first word there is none to follow
                follows = (histories[:, ORDER - 2 : -1] == last[:, None]) & (last >= 0)[:, None]
                rows, columns = follows.nonzero(as_tuple=True)
            else:
                same = histories[rows, columns + ORDER - 1 - k] == last[rows]
                rows, columns = rows[same], columns[same]
            total = torch.zeros_like(self.recency.totals[known]).index_add_(0, rows, self.recency.weights[columns])
            found = self._sum(recent, rows, columns, words)
            probs = (found + _PRIOR * probs) / (total.view(column) + _PRIOR)
        return probs

    def _sum(self, recent: Tensor, rows: Tensor, columns: Tensor, words: Tensor | None) -> Tensor:
        """Add up weights of the recent words at (row, column): of the word of a row [n], or of every word [n, V]."""
        found, weights = recent[rows, columns], self.recency.weights[columns]
        if words is None:
            sums = torch.zeros(len(recent), self.vocab_size, dtype=torch.float64)
            return sums.index_put_((rows, found.long()), weights, accumulate=True)
        own = found == words[rows]
        return torch.zeros(len(recent), dtype=torch.float64).index_add_(0, rows[own], weights[own])

    def begin(self) -> list[int]:
        return []

    def advance(self, context: list[int], token: int) -> list[int]:
        return self.recency.remember(context, token, ORDER - 1)

    def next_token(self, context: list[int]) -> Tensor:
        history = self.recency.histories(torch.tensor(context, dtype=torch.int64), ORDER - 1)[-1:]
        return self._interpolate(history)[0].log()

    def save(self, folder: Path, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"half_life": self.recency.half_life}, {}


class AdaptedContext(NamedTuple):
    """The prediction of the HMM, and the recent words."""

    hmm: HmmContext
    recent: list[int]


class AdaptedHmmPredictor(Predictor):
    """An HMM that adapts to recent words: p(w | past) ∝ p_HMM(w | past) (1 − s + s r(w) / u(w)).

    r are the frequencies of recent words, u [V] those of the training text. The words that the HMM expects here are
    the more likely, the more frequent they have been; the HMM itself is not changed, and reads the text as it is.
    """

    kind = "adapted hmm"

    @check_arguments
    def __init__(self, lm: LanguageModel, half_life: int, frequencies: Tensor) -> None:
        self.lm, self._hmm = lm, HmmPredictor(lm)
        words = lm.tokenizer.vocab_size
        if frequencies.shape != (words,) or not bool((frequencies > 0).all() and frequencies.isfinite().all()):
            raise InputError(f"frequencies must be {words} positive numbers, one for each word")
        self.recency = _Recency(half_life)
        self.frequencies = frequencies.double() / frequencies.double().sum()

    def token_log_probs(self, encoded: Sequence[Tokens]) -> list[Tensor]:
        return [self._adapted(tokens) for tokens in encoded]

    def _adapted(self, tokens: Tokens) -> Tensor:
        device = self.lm.device
        text = torch.tensor(tokens, dtype=torch.int64, device=device)
        histories, result = self.recency.histories(text), torch.zeros(len(text), dtype=torch.float64, device=device)
        for positions, log_probs in self._predictions(tokens):
            for own, part in self._pieces(positions, log_probs):
                result[own] = self._adapt(part, histories[own], text[own, None])[:, 0]
        return result.cpu()

    def _predictions(self, tokens: Tokens) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield positions [n] of a text, and log p(word there | past) [n, V] of the HMM."""
        sequences = self.lm.sequences(tokens)
        lengths = [len(sequence) for sequence in sequences]
        begins = torch.tensor([0, *lengths[:-1]], device=self.lm.device).cumsum(0)
        for chosen in length_batches(lengths, _TOKENS):
            own = begins[torch.tensor(chosen, device=self.lm.device)]
            batch = padded([sequences[i] for i in chosen])
            for sequence, step, log_probs in self.lm.hmm.predictions(*batch):
                yield own[sequence] + step, log_probs

    def _pieces(self, positions: Tensor, log_probs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        size = max(1, _CELLS // self.recency.size)
        return zip(positions.split(size), log_probs.split(size), strict=True)

    def _adapt(self, log_probs: Tensor, histories: Tensor, words: Tensor) -> Tensor:
        """Compute the log-probabilities [n, m] of words [n, m] from those of the HMM [n, V] and histories [n, size]."""
        device, vocab_size = log_probs.device, log_probs.shape[1]
        # Without a past there is nothing to adapt to; after an impossible word every word is as likely.
        begun, lost = histories[:, -1:] >= 0, log_probs.amax(1, keepdim=True) == -math.inf
        share = torch.where(begun, _SHARE, 0.0)
        recent = histories.clamp(min=0)
        weights = self.recency.weights.to(device) * (histories >= 0)
        ratios = weights / weights.sum(1, keepdim=True).clamp(min=1) / self.frequencies.to(device)[recent]
        probs = log_probs.gather(1, recent).double().exp().masked_fill(lost, 1 / vocab_size)
        scale = 1 - share + share * (ratios * probs).sum(1, keepdim=True)
        if words.shape[1] == 1:
            ratio = (ratios * (recent == words)).sum(1, keepdim=True)
        else:
            ratio = torch.zeros(len(words), vocab_size, dtype=torch.float64, device=device)
            ratio = ratio.scatter_add_(1, recent, ratios).gather(1, words)
        own = log_probs.gather(1, words).double().masked_fill(lost, -math.log(vocab_size))
        return own + (1 - share + share * ratio).log() - scale.log()

    def begin(self) -> AdaptedContext:
        return AdaptedContext(self._hmm.begin(), [])

    def advance(self, context: AdaptedContext, token: int) -> AdaptedContext:
        return AdaptedContext(self._hmm.advance(context.hmm, token), self.recency.remember(context.recent, token))

    def next_token(self, context: AdaptedContext) -> Tensor:
        recent = torch.tensor(context.recent, dtype=torch.int64)
        words = torch.arange(len(self.frequencies))[None]
        return self._adapt(self._hmm.next_token(context.hmm)[None], self.recency.histories(recent)[-1:], words)[0]

    def save(self, folder: Path, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
        self.lm.save(folder)
        return {"half_life": self.recency.half_life}, {f"{folder.name}.frequencies": self.frequencies}
