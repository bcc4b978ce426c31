"""Interpolated modified Kneser-Ney n-grams of any order: what every hidden Markov language model is compared with.

Orders 1 and 2 are the unigram and bigram of the reports, order 5 is the count-based baseline of the papers. A model is
trained on token ids and scored on the tokens an HMM is scored on: every token counts, `<eos>` and `<unk>` included.

Every n-gram seen in training has an id: that of a k-gram is the rank of (id of its first k−1 tokens, last token) among
those seen. So any order fits int64, and training and scoring are a handful of sorts and searches, no loop over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hmmlm.errors import InputError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Order:
    """The k-grams of one order: N of them are known, and M contexts (the known (k−1)-grams) they may follow.

    Both tables end with an entry for id −1, a k-gram or context that is not known."""

    codes: IntArray  # [N] sorted: id of the first k−1 tokens · V + last token
    discounted: FloatArray  # [N+1] (count − discount) / count of the context: this order's part of p(w | context)
    backoff: FloatArray  # [M+1] what is left of a context's mass for the next lower order


class NgramModel:
    """Interpolated modified Kneser-Ney n-gram over token ids.

    With an `eos` id the context restarts there, as an HMM that is reset at `<eos>` does: a sentence sees the `<eos>`
    before it as its start and nothing further back. With None the context runs on, as an HMM with carried state does.
    The first token of any text is predicted as if it followed `eos` (token 0 if None).
    """

    def __init__(self, tokens: ArrayLike, vocab_size: int, order: int, eos: int | None = None) -> None:
        if order < 1:
            raise InputError(f"the order of an n-gram must be at least 1, not {order}")
        self.vocab_size, self.order, self.eos = vocab_size, order, eos
        text = self._checked(tokens)
        if len(text) == 1:
            raise InputError("an n-gram cannot be trained on an empty text")
        # Order 1 knows the whole vocabulary, so that the id of a unigram is its token.
        codes, grams, contexts = [np.arange(vocab_size)], [text], [1]
        counts = [np.bincount(text[1:], minlength=vocab_size)]
        for k in range(2, order + 1):
            code_at = self._codes(self._as_context(grams[-1], text, k - 1), text)
            seen, gram_at, count = np.unique(code_at, return_inverse=True, return_counts=True)
            # The first unique code is −1, of the positions that end no k-gram (position 0 never does).
            codes.append(seen[1:])
            counts.append(count[1:])
            grams.append(gram_at - 1)
            contexts.append(len(codes[-2]))
        self.orders: list[Order] = []
        for k in range(order):
            count = counts[k]
            if k < order - 1:
                count = _continuations(count, grams[k], grams[k + 1], len(codes[k + 1]))
            self.orders.append(_smooth(codes[k], count, codes[k] // vocab_size, contexts[k]))

    def log_probs(self, tokens: ArrayLike) -> FloatArray:
        """tokens [N] → natural log p(token | its context), [N]."""
        text = self._checked(tokens)
        return self._interpolate([context[:-1] for context in self._contexts(text)], text[1:])

    def next_token(self, context: ArrayLike) -> FloatArray:
        """context [N], N = 0 allowed → natural log p(w | context) of every word, [V]."""
        contexts = [ids[-1:] for ids in self._contexts(self._checked(context))]
        return self._interpolate(contexts, np.arange(self.vocab_size))

    def perplexity(self, tokens: ArrayLike) -> float:
        """exp(−Σ log p / number of tokens): the measure the HMMs are given."""
        log_probs = self.log_probs(tokens)
        if not len(log_probs):
            raise InputError("a text without tokens has no perplexity")
        return float(np.exp(-log_probs.mean()))

    def _interpolate(self, contexts: list[IntArray], tokens: IntArray) -> FloatArray:
        """contexts: for every order the ids [N] or [1] (−1: not known) before tokens [N] → log-probabilities [N]."""
        probs = np.full(len(tokens), 1.0 / self.vocab_size)
        for order, context in zip(self.orders, contexts, strict=True):
            grams = _find(order.codes, np.where(context >= 0, context * self.vocab_size + tokens, -1))
            probs = probs * order.backoff[context] + order.discounted[grams]
        return np.log(probs)

    def _contexts(self, text: IntArray) -> list[IntArray]:
        """For k = 0 … order−1 the id of the k-gram that ends at each position, [N+1]; −1: no known context."""
        contexts = [np.zeros_like(text), text][: self.order]
        for k in range(2, self.order):
            grams = _find(self.orders[k - 1].codes, self._codes(contexts[-1], text))
            contexts.append(self._as_context(grams, text, k))
        return contexts

    def _codes(self, contexts: IntArray, text: IntArray) -> IntArray:
        """Code of (context that ends at the position before, token) at each position, [N+1]; −1 where there is none."""
        codes = np.full_like(text, -1)
        codes[1:] = np.where(contexts[:-1] >= 0, contexts[:-1] * self.vocab_size + text[1:], -1)
        return codes

    def _as_context(self, grams: IntArray, text: IntArray, k: int) -> IntArray:
        """The k-grams that may be a context: a context may start with `<eos>`, not reach across it."""
        return grams if self.eos is None or k == 1 else np.where(text == self.eos, -1, grams)

    def _checked(self, tokens: ArrayLike) -> IntArray:
        """tokens [N] → [N+1] int64 with the start token in front."""
        array = np.asarray(tokens)
        if array.ndim != 1 or (len(array) and not np.issubdtype(array.dtype, np.integer)):
            raise InputError(f"tokens must be a flat array of integers, not {array.dtype} of shape {array.shape}")
        bad = np.flatnonzero((array < 0) | (array >= self.vocab_size))
        if len(bad):
            where = f"token {array[bad[0]]} at position {bad[0]}"
            raise InputError(f"{where} is outside the vocabulary of {self.vocab_size}")
        return np.concatenate([[self.eos or 0], array.astype(np.int64)])


def _find(codes: IntArray, wanted: IntArray) -> IntArray:
    """Index of each wanted code in the sorted codes, −1 where it is not among them."""
    if not len(codes):
        return np.full_like(wanted, -1)
    index = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
    return np.where(codes[index] == wanted, index, -1)


def _continuations(counts: IntArray, grams: IntArray, longer: IntArray, num_longer: int) -> IntArray:
    """Number of different tokens seen before each k-gram, which is how Kneser-Ney counts the lower orders.

    A k-gram that nothing precedes (it opens a sentence or the text) keeps its count, as is usual."""
    suffix = np.empty(num_longer, np.int64)
    ends = longer >= 0
    suffix[longer[ends]] = grams[ends]
    distinct = np.bincount(suffix, minlength=len(counts))
    return np.where(distinct > 0, distinct, counts)


def _smooth(codes: IntArray, counts: IntArray, contexts_of: IntArray, contexts: int) -> Order:
    """Modified Kneser-Ney: one discount each for counts 1, 2 and 3 or more, from the counts of counts of this order."""
    n = np.bincount(np.minimum(counts, 5), minlength=5).astype(np.float64)
    y = n[1] / (n[1] + 2 * n[2]) if n[1] and n[2] else 0.5
    # j − (j+1)·y·n[j+1]/n[j]; a corpus too small to tell, or cut at a minimum count, falls back to y. The floor keeps
    # mass for what was never seen, whatever the counts of counts look like: no word may have probability zero.
    by_count = [j - (j + 1) * y * n[j + 1] / n[j] if n[j] and n[j + 1] else y for j in (1, 2, 3)]
    discounts = np.array([0.0, *np.clip(by_count, 0.05, [0.95, 1.95, 2.95])])
    kept = counts - discounts[np.minimum(counts, 3)]
    total = np.bincount(contexts_of, weights=counts, minlength=contexts)
    share = np.bincount(contexts_of, weights=kept, minlength=contexts) / np.maximum(total, 1)
    return Order(codes, np.append(kept / np.maximum(total, 1)[contexts_of], 0.0), np.append(1.0 - share, 1.0))
