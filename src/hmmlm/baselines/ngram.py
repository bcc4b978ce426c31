"""Interpolated modified Kneser-Ney n-grams of any order, the count-based baseline of the HMMs.

Orders 1 and 2 are the unigram and bigram of the reports, order 5 is the count-based baseline of the papers. A model is
trained on token ids and scored on the same tokens as an HMM: every token counts, `<eos>` and `<unk>` included.

Every k-gram seen in training has an id: the rank of (id of its first k−1 tokens, last token) among the k-grams seen.
So any order fits int64, and training and scoring take a few sorts and searches instead of a loop over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hmmlm.arguments import check_arguments
from hmmlm.checks import check_count
from hmmlm.errors import InputError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
MAX_ORDER = 100


@dataclass(frozen=True)
class Order:
    """The N known k-grams of one order, and the M contexts (known (k−1)-grams) that they may follow.

    Both tables end with an entry for id −1, an unknown k-gram or context."""

    codes: IntArray  # [N] sorted: id of the first k−1 tokens · V + last token
    discounted: FloatArray  # [N+1] (count − discount) / count of the context: the term of this order in p(w | context)
    backoff: FloatArray  # [M+1] the mass of a context that is left for the next lower order


class NgramModel:
    """Interpolated modified Kneser-Ney n-gram over token ids.

    With an `eos` id the context restarts there, as in an HMM that restarts at `<eos>`: the context of a sentence starts
    with the `<eos>` before it. With None the context continues, as in an HMM with a carry. The first token of any text
    is predicted as if it followed `eos` (token 0 if None).
    """

    @check_arguments
    def __init__(self, tokens: ArrayLike, vocab_size: int, order: int, eos: int | None = None) -> None:
        check_count("order", order, 1, MAX_ORDER)
        check_count("vocab_size", vocab_size, 1)
        if eos is not None:
            check_count("eos", eos, 0, vocab_size - 1)
        self.vocab_size, self.order, self.eos = vocab_size, order, eos
        text = self._checked(tokens)
        if len(text) == 1:
            raise InputError("an n-gram cannot be trained on an empty text")
        # Order 1 knows the whole vocabulary, so that the id of a unigram is its token.
        codes, gram_at, contexts = np.arange(vocab_size), text, 1
        count = np.bincount(text[1:], minlength=vocab_size)
        self.orders: list[Order] = []
        for k in range(2, order + 1):
            seen, longer_at, longer_count = _rank(self._codes(self._as_context(gram_at, text, k - 1), text))
            # The first unique code is −1, for positions that end no k-gram, such as position 0.
            seen, longer_at = seen[1:], longer_at - 1
            count = _continuations(count, gram_at, longer_at, len(seen))
            self.orders.append(_smooth(codes, count, codes // vocab_size, contexts))
            codes, gram_at, count, contexts = seen, longer_at, longer_count[1:], len(codes)
        self.orders.append(_smooth(codes, count, codes // vocab_size, contexts))

    @classmethod
    def from_orders(cls, orders: list[Order], vocab_size: int, eos: int | None) -> NgramModel:
        """Return a model of given tables, order 1 first."""
        model = cls.__new__(cls)
        model.vocab_size, model.order, model.eos, model.orders = vocab_size, len(orders), eos, orders
        return model

    def gram_log_probs(self, grams: ArrayLike) -> FloatArray:
        """Compute natural log p(last token | the others) [N] of k-grams [N, k], whose first token may be `eos`."""
        tokens = np.asarray(grams, dtype=np.int64)
        length = tokens.shape[1]
        contexts = [self.gram_ids(tokens[:, length - k : length - 1]) for k in range(1, length + 1)]
        return self._interpolate(contexts, tokens[:, -1])

    def gram_ids(self, grams: IntArray) -> IntArray:
        """Return the id of each k-gram [N, k]; −1 if it is not known. The empty one has id 0."""
        ids = np.zeros(len(grams), np.int64) if grams.shape[1] == 0 else grams[:, 0]
        for k in range(1, grams.shape[1]):
            ids = _find(self.orders[k].codes, np.where(ids >= 0, ids * self.vocab_size + grams[:, k], -1))
        return ids

    def log_probs(self, tokens: ArrayLike) -> FloatArray:
        """Compute natural log p(token | its context) [N] for tokens [N]."""
        text = self._checked(tokens)
        return self._interpolate([context[:-1] for context in self._contexts(text)], text[1:])

    def next_token(self, context: ArrayLike) -> FloatArray:
        """Compute natural log p(w | context) of every word [V] for context [N], which may be empty."""
        contexts = [ids[-1:] for ids in self._contexts(self._checked(context))]
        return self._interpolate(contexts, np.arange(self.vocab_size))

    @property
    def context_classes(self) -> int:
        """The number of values of `known_contexts`."""
        return max(1, self.order - 1)

    def known_contexts(self, tokens: ArrayLike) -> IntArray:
        """Return how well known the context of each token [N] is, and that of the token after the last: [N + 1].

        That is the number of contexts, of two tokens up to order − 1, that were seen in training: 0 to order − 2.
        """
        contexts = self._contexts(self._checked(tokens))
        known = np.zeros_like(contexts[0])
        for context in contexts[2:]:
            known += context >= 0
        return known

    def perplexity(self, tokens: ArrayLike) -> float:
        """Compute exp(−Σ log p / number of tokens), as for the HMMs."""
        log_probs = self.log_probs(tokens)
        if not len(log_probs):
            raise InputError("a text without tokens has no perplexity")
        return float(np.exp(-log_probs.mean()))

    def _interpolate(self, contexts: list[IntArray], tokens: IntArray) -> FloatArray:
        """Compute log-probabilities [N] of tokens [N] from context ids [N] or [1] (−1: unknown) of the first orders."""
        probs = np.full(len(tokens), 1.0 / self.vocab_size)
        for order, context in zip(self.orders, contexts, strict=False):
            grams = _find(order.codes, np.where(context >= 0, context * self.vocab_size + tokens, -1))
            probs = probs * order.backoff[context] + order.discounted[grams]
        return np.log(probs)

    def _contexts(self, text: IntArray) -> list[IntArray]:
        """Return for k = 0 … order−1 the id of the k-gram that ends at each position [N+1]; −1: no known context."""
        contexts = [np.zeros_like(text), text][: self.order]
        for k in range(2, self.order):
            grams = _find(self.orders[k - 1].codes, self._codes(contexts[-1], text))
            contexts.append(self._as_context(grams, text, k))
        return contexts

    def _codes(self, contexts: IntArray, text: IntArray) -> IntArray:
        """Return the code of (context that ends at the previous position, token) for each position [N+1]; −1: none."""
        codes = np.full_like(text, -1)
        known = contexts[:-1] >= 0
        np.multiply(contexts[:-1], self.vocab_size, out=codes[1:], where=known)
        np.add(codes[1:], text[1:], out=codes[1:], where=known)
        return codes

    def _as_context(self, grams: IntArray, text: IntArray, k: int) -> IntArray:
        """Return the k-grams that may be a context: a context may start with `<eos>`, but not extend across it."""
        return grams if self.eos is None or k == 1 else np.where(text == self.eos, -1, grams)

    def _checked(self, tokens: ArrayLike) -> IntArray:
        """Return tokens [N] as int64 [N+1] with the start token first; raise an InputError if they are invalid."""
        try:
            array = np.asarray(tokens)
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"tokens must be a flat array of integers: {error}") from None
        if array.ndim != 1 or (len(array) and not np.issubdtype(array.dtype, np.integer)):
            raise InputError(f"tokens must be a flat array of integers, not {array.dtype} of shape {array.shape}")
        bad = np.flatnonzero((array < 0) | (array >= self.vocab_size))
        if len(bad):
            where = f"token {array[bad[0]]} at position {bad[0]}"
            raise InputError(f"{where} is outside the vocabulary of {self.vocab_size}")
        return np.concatenate([[self.eos or 0], array.astype(np.int64)])


def _rank(codes: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return the distinct codes, sorted, the index in them of each code, and their counts.

    This is `np.unique`, in half of the memory: it is what the largest text for an n-gram depends on.
    """
    order = np.argsort(codes, kind="stable")
    codes = codes[order]
    first = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
    counts = np.diff(np.append(first, len(codes)))
    seen, index = codes[first], np.empty_like(codes)
    del codes
    index[order] = np.repeat(np.arange(len(seen)), counts)
    return seen, index, counts


def _find(codes: IntArray, wanted: IntArray) -> IntArray:
    """Return the index of each wanted code in the sorted codes; −1 if it is not among them."""
    if not len(codes):
        return np.full_like(wanted, -1)
    index = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
    return np.where(codes[index] == wanted, index, -1)


def _continuations(counts: IntArray, grams: IntArray, longer: IntArray, num_longer: int) -> IntArray:
    """Count the distinct tokens before each k-gram, which Kneser-Ney uses as the counts of lower orders.

    A k-gram without a predecessor (at the start of a sentence or the text) keeps its count, as usual."""
    suffix = np.empty(num_longer, np.int64)
    ends = longer >= 0
    suffix[longer[ends]] = grams[ends]
    distinct = np.bincount(suffix, minlength=len(counts))
    return np.where(distinct > 0, distinct, counts)


def _smooth(codes: IntArray, counts: IntArray, contexts_of: IntArray, contexts: int) -> Order:
    """Apply modified Kneser-Ney: discounts for counts 1, 2 and 3 or more, from the counts of counts of this order."""
    n = np.bincount(np.minimum(counts, 5), minlength=5).astype(np.float64)
    y = n[1] / (n[1] + 2 * n[2]) if n[1] and n[2] else 0.5
    # j − (j+1)·y·n[j+1]/n[j], or y if the corpus is too small or cut at a minimum count. The floor keeps mass for
    # unseen n-grams, whatever the counts of counts are: no word may have probability zero.
    by_count = [j - (j + 1) * y * n[j + 1] / n[j] if n[j] and n[j + 1] else y for j in (1, 2, 3)]
    discounts = np.array([0.0, *np.clip(by_count, 0.05, [0.95, 1.95, 2.95])])
    kept = counts - discounts[np.minimum(counts, 3)]
    total = np.bincount(contexts_of, weights=counts, minlength=contexts)
    share = np.bincount(contexts_of, weights=kept, minlength=contexts) / np.maximum(total, 1)
    return Order(codes, np.append(kept / np.maximum(total, 1)[contexts_of], 0.0), np.append(1.0 - share, 1.0))
