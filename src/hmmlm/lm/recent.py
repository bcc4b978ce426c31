"""Components of a mixture that follow the words of the text so far, the recent ones most.

A word i words ago has the weight 2^(−i / half-life). `RecentPredictor` predicts the words that followed the last words
before (a cache of trigrams), `AdaptedHmmPredictor` is an HMM whose words become as frequent as they have been recently
(the dynamic marginals of Kneser, Peters and Klakow 1997).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hmmlm.arguments import check_arguments
from hmmlm.checks import check_count, padded
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.errors import InputError
from hmmlm.lm.lm import LanguageModel
from hmmlm.lm.predictors import HmmContext, HmmPredictor, Predictor
from hmmlm.lm.sequences import length_batches
from hmmlm.ops.pieces import at_once

ORDER = 3
"""Words of the longest sequences that are found again, the predicted one included."""
MAX_HALF_LIFE = 100_000
_PRIOR = 0.5  # weight of shorter sequences, in occurrences
_SHARE = 0.3  # of the recent frequencies in the frequencies that an HMM adapts to
_HALVES = 8  # half-lives after which an HMM forgets a word: its weight is 1/256
_REMEMBERED = 64  # half-lives of words that are kept while sampling; older ones have no weight
_TOKENS = 2**19  # that an HMM reads together, so that what its blocks share is computed once

Tokens = Sequence[int]


class RecentPredictor(Predictor):
    """The words that followed the last two words recently, interpolated with those after the last one, and with all.

    p_k(w) = (c_k(w) + m p_k−1(w)) / (Σ_w c_k(w) + m), where c_k(w) is the weight of w after the last k − 1 words and
    p_1 the share of w among recent words. Before the first token every word is as likely.
    """

    kind = "recent"

    @check_arguments
    def __init__(self, half_life: int, vocab_size: int) -> None:
        check_count("half_life", half_life, 1, MAX_HALF_LIFE)
        check_count("vocab_size", vocab_size, 1)
        self.half_life, self.vocab_size = half_life, vocab_size

    def token_log_probs(self, encoded: Sequence[Tokens]) -> list[Tensor]:
        return [torch.from_numpy(self._log_probs(np.array(tokens, dtype=np.int64))) for tokens in encoded]

    def _log_probs(self, tokens: np.ndarray) -> np.ndarray:
        probs, positions = np.full(len(tokens), 1 / self.vocab_size), np.arange(len(tokens))
        contexts = np.zeros_like(tokens)  # ids of the k words before; their own where there are fewer
        for k in range(ORDER):
            grams = np.unique(contexts * self.vocab_size + tokens, return_inverse=True)[1]
            total, found = self._weights(contexts), self._weights(grams)
            probs = _interpolate(found, total, probs, k)
            contexts = np.where(positions > k, np.roll(grams, 1), -1 - positions)
        with np.errstate(divide="ignore"):
            return np.log(probs)

    def _weights(self, ids: np.ndarray) -> np.ndarray:
        """Return for each id [N] the weight of the same id before it."""
        decay, found = 0.5 ** (1 / self.half_life), list[float]()
        latest: dict[int, tuple[int, float]] = {}  # of each id: the position after it, and the weight there
        for t, own in enumerate(ids.tolist()):
            after, weight = latest.get(own, (t, 0.0))
            found.append(weight * decay ** (t - after))
            latest[own] = t + 1, found[-1] * decay + 1
        return np.array(found)

    def begin(self) -> list[int]:
        return []

    def advance(self, context: list[int], token: int) -> list[int]:
        return [*context, token][-_REMEMBERED * self.half_life :]

    def next_token(self, context: list[int]) -> Tensor:
        tokens = np.array(context, dtype=np.int64)
        weights = np.exp2(-np.arange(len(tokens))[::-1] / self.half_life)
        probs = np.full(self.vocab_size, 1 / self.vocab_size)
        for k in range(min(ORDER, len(tokens) + 1)):
            if k:  # words of which the k-th last before is that of the next one
                weights[:k] = 0
                weights[k:] *= tokens[:-k] == tokens[-k]
            probs = _interpolate(np.bincount(tokens, weights, self.vocab_size), weights.sum(), probs, k)
        return torch.from_numpy(probs).log()

    def save(self, folder: Path, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"half_life": self.half_life}, {}


def _interpolate(found: np.ndarray, total: Any, probs: np.ndarray, k: int) -> np.ndarray:
    """Return probabilities after k words, by the weight of a word after them, of all words, and `probs` after fewer."""
    prior = np.where(np.asarray(total) > 0, 0.0, 1.0) if k == 0 else _PRIOR
    return (found + prior * probs) / (total + prior)


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
        check_count("half_life", half_life, 1, MAX_HALF_LIFE)
        self.half_life, self.size = half_life, _HALVES * half_life
        self._weights = torch.exp2(-torch.arange(self.size, dtype=torch.float64) / half_life).flip(0)  # oldest first
        self.frequencies = frequencies.double() / frequencies.double().sum()
        self._rarity, self._uniform = 1 / self.frequencies, -math.log(words)

    def token_log_probs(self, encoded: Sequence[Tokens]) -> list[Tensor]:
        longest = max(map(len, encoded), default=0)
        if not longest:
            return [torch.zeros(0, dtype=torch.float64) for _ in encoded]
        # All texts in one, each after as many missing words as are remembered of the longest.
        remembered = min(self.size, longest)
        before = [-1] * remembered
        begins = list(accumulate((len(before) + len(tokens) for tokens in encoded), initial=0))
        joined = torch.tensor([word for tokens in encoded for word in [*before, *tokens]], device=self.lm.device)
        log_probs = torch.zeros(len(joined), dtype=torch.float64, device=self.lm.device)
        rarity = self._rarity_of(joined)
        # No other words than those of the texts are needed: their places among them stand for them.
        words, inverse = joined[joined >= 0].unique(return_inverse=True)
        joined[joined >= 0] = inverse
        windows = [values.unfold(0, remembered, 1) for values in (joined, rarity)]
        begins_of_words = [begin + remembered for begin in begins[:-1]]
        for positions, possible, observed, probs in self._predictions(encoded, begins_of_words, words):
            size = at_once(remembered, 2**22)
            for own, known, log_prob, part in zip(
                *(each.split(size) for each in (positions, possible, observed, probs)), strict=True
            ):
                lost = ~known[:, None]
                here = log_prob[:, None].masked_fill(lost, self._uniform)
                part = part.masked_fill(lost, math.exp(self._uniform))
                recent, rare = (each.index_select(0, own - remembered) for each in windows)
                log_probs[own] = self._adapt(here, part, recent, rare, joined[own, None])[:, 0]
        return [log_probs[end - len(tokens) : end].cpu() for tokens, end in zip(encoded, begins[1:], strict=True)]

    def _predictions(
        self, encoded: Sequence[Tokens], begins: Sequence[int], words: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield positions [n] in texts that begin at given ones, and `Predictions` of `words` [W] there.

        These are whether the past is possible [n], log p(the word there | past) [n] and p(words | past) [n, W].
        """
        sequences, firsts = list[list[int]](), list[int]()
        for tokens, begin in zip(encoded, begins, strict=True):
            for sequence in filter(None, self.lm.sequences(tokens)):
                sequences.append(sequence)
                firsts.append(begin)
                begin += len(sequence)
        for chosen in length_batches([len(sequence) for sequence in sequences], _TOKENS):
            first = torch.tensor([firsts[i] for i in chosen], device=self.lm.device)
            for found in self.lm.hmm.predictions(*padded([sequences[i] for i in chosen]), words):
                yield first[found.sequence] + found.step, found.possible, found.log_observed, found.probs

    def _rarity_of(self, words: Tensor) -> Tensor:
        """Return 1 / u(word) of words of any shape; 0 for missing ones."""
        return torch.where(words < 0, 0.0, self._rarity.to(words.device)[words])

    def _adapt(self, log_words: Tensor, probs: Tensor, histories: Tensor, rarity: Tensor, words: Tensor) -> Tensor:
        """Compute the log-probabilities [n, m] of words [n, m], by those of the HMM.

        Args:
            log_words: log p(word | past) [n, m] of the HMM.
            probs: p(· | past) [n, W] of the HMM, of all words in the histories.
            histories: [n, r] the words before, r at most `size`; −1: none.
            rarity: [n, r] `_rarity_of` them.
        """
        device, weights = probs.device, self._weights[-histories.shape[1] :].to(probs.device)
        share = torch.where(histories[:, -1:] >= 0, _SHARE, 0.0).double()  # at first there is nothing to adapt to
        recent = histories.clamp(min=0)
        ratios = rarity * weights  # r(w) / u(w), from each occurrence of w
        ratios /= ((rarity > 0).double() @ weights).clamp_(min=1)[:, None]
        places = recent + torch.arange(0, probs.numel(), probs.shape[1], device=device)[:, None]
        found = probs.reshape(-1).index_select(0, places.view(-1)).view_as(recent).double()
        expected = found.mul_(ratios).sum(1, keepdim=True)
        if words.shape[1] == 1:
            ratio = torch.where(histories == words, ratios, 0.0).sum(1, keepdim=True)
        else:
            ratio = torch.zeros(probs.shape, dtype=torch.float64, device=device)
            ratio = ratio.scatter_add_(1, recent, ratios).gather(1, words)
        return log_words.double() + (1 - share + share * ratio).log() - (1 - share + share * expected).log()

    def begin(self) -> AdaptedContext:
        return AdaptedContext(self._hmm.begin(), [])

    def advance(self, context: AdaptedContext, token: int) -> AdaptedContext:
        return AdaptedContext(self._hmm.advance(context.hmm, token), [*context.recent, token][-self.size :])

    def next_token(self, context: AdaptedContext) -> Tensor:
        history = torch.tensor([[-1] * self.size + context.recent])[:, -self.size :]
        words = torch.arange(len(self.frequencies))[None]
        log_probs = self._hmm.next_token(context.hmm)[None]
        return self._adapt(log_probs, log_probs.exp(), history, self._rarity_of(history), words)[0]

    def save(self, folder: Path, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
        self.lm.save(folder)
        return {"half_life": self.half_life}, {f"{folder.name}.frequencies": self.frequencies}
