"""Sparse bigram counts of a text, and the average mutual information of a clustering."""

from dataclasses import dataclass

import numpy as np

from hmmlm.errors import InputError
from hmmlm.pages import release_pages

PIECE_TOKENS = 1 << 22


def xlogx(x: np.ndarray) -> np.ndarray:
    """Compute x log x, in nats, for non-negative integer counts stored as floats; 0 at 0."""
    return x * np.log(np.maximum(x, 1.0))


@dataclass(frozen=True)
class Bigrams:
    """Sparse bigram counts; the words after word w are `next_word[next_start[w] : next_start[w + 1]]`."""

    counts: np.ndarray  # [V] occurrences of each word, whether or not in a bigram
    next_start: np.ndarray  # [V+1]
    next_word: np.ndarray  # [pairs]
    next_count: np.ndarray  # [pairs] float64
    previous_start: np.ndarray  # [V+1]
    previous_word: np.ndarray  # [pairs]
    previous_count: np.ndarray  # [pairs] float64

    @property
    def vocab_size(self) -> int:
        return len(self.counts)

    def marginals(self) -> tuple[np.ndarray, np.ndarray]:
        """Return how often each word is the first [V] and the second [V] of a bigram."""
        words = np.arange(self.vocab_size)
        firsts = np.repeat(words, np.diff(self.next_start))
        seconds = np.repeat(words, np.diff(self.previous_start))
        return (
            np.bincount(firsts, self.next_count, self.vocab_size),
            np.bincount(seconds, self.previous_count, self.vocab_size),
        )

    def by_cluster(self, word: int, cluster: np.ndarray, clusters: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Count each cluster after a word [C] and before it [C], and the word after itself.

        Both vectors exclude the word itself and words whose entry of `cluster` [V] is −1.
        """
        after = slice(self.next_start[word], self.next_start[word + 1])
        before = slice(self.previous_start[word], self.previous_start[word + 1])
        itself = float(self.next_count[after][self.next_word[after] == word].sum())
        vectors = []
        for others, weights in (
            (self.next_word[after], self.next_count[after]),
            (self.previous_word[before], self.previous_count[before]),
        ):
            into = np.where(others == word, -1, cluster[others])  # bin 0 collects the excluded words
            vectors.append(np.bincount(into + 1, weights, clusters + 1)[1:])
        return vectors[0], vectors[1], itself


def _checked(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the tokens as int64; raise an InputError if one is outside the vocabulary."""
    tokens = np.asarray(tokens, dtype=np.int64)
    wrong = tokens[(tokens < -1) | (tokens >= vocab_size)]
    if wrong.size:
        raise InputError(
            f"token {wrong[0]} is outside the vocabulary of {vocab_size} words: tokenize the text with this vocabulary"
        )
    return tokens


def _pairs(tokens: np.ndarray, documents: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and second tokens of all bigrams; none crosses a document start or has a missing token."""
    together = (tokens[:-1] >= 0) & (tokens[1:] >= 0)
    if documents is not None:
        starts = np.asarray(documents)
        together[starts[(starts > 0) & (starts < len(tokens))] - 1] = False
    return tokens[:-1][together], tokens[1:][together]


def count_bigrams(
    tokens: np.ndarray, vocab_size: int, documents: np.ndarray | None = None, piece_tokens: int = PIECE_TOKENS
) -> Bigrams:
    """Count the bigrams of a text, in memory that does not grow with it but with its different bigrams.

    Args:
        tokens: [N] word ids, which may be memory-mapped; −1 is missing, and no bigram contains it.
        documents: ascending offsets at which documents start; no bigram crosses one.
        piece_tokens: tokens that are counted at a time.
    """
    tokens, counts = np.asanyarray(tokens), np.zeros(vocab_size, np.int64)
    found = _Pairs()
    for first in range(0, max(1, len(tokens)), piece_tokens):
        piece = _checked(tokens[first : first + piece_tokens + 1], vocab_size)  # and the first token of the next piece
        own = piece[:piece_tokens]
        counts += np.bincount(own[own >= 0], minlength=vocab_size)
        starts = None if documents is None else _offsets_within(documents, first, first + len(piece))
        left, right = _pairs(piece, starts)
        found.add(*np.unique(left * vocab_size + right, return_counts=True))
        for array in (tokens, *(() if documents is None else (documents,))):
            release_pages(array)
    pair, count = found.total()
    first_word, second, weight = pair // vocab_size, pair % vocab_size, count.astype(np.float64)
    by_second = np.argsort(second, kind="stable")
    bounds = np.arange(vocab_size + 1)
    return Bigrams(
        counts=counts,
        next_start=np.searchsorted(first_word, bounds),
        next_word=second,
        next_count=weight,
        previous_start=np.searchsorted(second[by_second], bounds),
        previous_word=first_word[by_second],
        previous_count=weight[by_second],
    )


def _offsets_within(documents: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Return the offsets in [begin, end), relative to begin."""
    first, last = np.searchsorted(documents, (begin, end))
    return np.asarray(documents[first:last], np.int64) - begin


class _Pairs:
    """Sums of sparse counts: those of pieces are joined when they are as many as the sums so far."""

    def __init__(self) -> None:
        self.parts: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, keys: np.ndarray, counts: np.ndarray) -> None:
        """Add counts [n] of ascending keys [n]."""
        self.parts.append((keys, counts))
        while len(self.parts) > 1 and len(self.parts[-1][0]) >= len(self.parts[-2][0]) / 2:
            self._join()

    def total(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all keys, ascending, and their counts."""
        while len(self.parts) > 1:
            self._join()
        return self.parts[0]

    def _join(self) -> None:
        (keys, counts), (more_keys, more_counts) = self.parts.pop(), self.parts.pop()
        joined, index = np.unique(np.concatenate([keys, more_keys]), return_inverse=True)
        sums = np.zeros(len(joined), np.int64)
        sums[index[: len(keys)]] = counts
        sums[index[len(keys) :]] += more_counts
        self.parts.append((joined, sums))


def cluster_table(bigrams: Bigrams, cluster: np.ndarray, clusters: int) -> np.ndarray:
    """Count the bigrams between clusters [C, C]; every word of a bigram must have a cluster."""
    first = np.repeat(cluster, np.diff(bigrams.next_start))
    pair = first * clusters + cluster[bigrams.next_word]
    return np.bincount(pair, bigrams.next_count, clusters**2).reshape(clusters, clusters)


def mutual_information(table: np.ndarray) -> float:
    """Compute the mutual information, in nats, of row and column of a count table [C, C]; 0 for an empty table."""
    total = table.sum()
    if total == 0:
        return 0.0
    inside = xlogx(table).sum() - xlogx(table.sum(1)).sum() - xlogx(table.sum(0)).sum() + xlogx(total)
    return float(inside / total)


def average_mutual_information(
    tokens: np.ndarray, cluster: np.ndarray, *, documents: np.ndarray | None = None
) -> float:
    """Compute the average mutual information, in nats, of the clusters of neighboring words of a text.

    Args:
        tokens: [N] word ids; −1 is missing.
        cluster: [V] cluster of each word; words of cluster −1 count as missing. Two clusterings are therefore compared
            on the same bigrams only if they leave out the same words.
        documents: offsets at which documents start; no bigram crosses one.
    """
    cluster = np.asarray(cluster, dtype=np.int64)
    tokens = _checked(tokens, len(cluster))
    classes = np.where(tokens >= 0, cluster[tokens], -1)
    clusters = int(cluster.max()) + 1
    first, second = _pairs(classes, documents)
    table = np.bincount(first * clusters + second, minlength=clusters**2).reshape(clusters, clusters)
    return mutual_information(table.astype(np.float64))
