"""The exchange algorithm: move words between clusters as long as the mutual information of neighbours grows."""

import numpy as np

from hmmlm.structure.bigrams import Bigrams, cluster_table, xlogx


def exchange(bigrams: Bigrams, cluster: np.ndarray, clusters: int, passes: int) -> np.ndarray:
    """Go over the words by frequency and move each to the cluster that gives the most average mutual information.

    cluster: [V], −1 for words that stay out; returns a new [V]. Stops before `passes` passes when one moves no word.
    A word alone in its cluster stays, so no cluster becomes empty.
    """
    cluster = cluster.copy()
    table = cluster_table(bigrams, cluster, clusters)
    first, second = bigrams.marginals()
    sizes = np.bincount(cluster[cluster >= 0], minlength=clusters)
    by_frequency = np.argsort(-bigrams.counts, kind="stable")
    words = by_frequency[cluster[by_frequency] >= 0].tolist()
    for _ in range(passes):
        moved = False
        for word in words:
            old = int(cluster[word])
            if sizes[old] == 1:
                continue
            after, before, itself = bigrams.by_cluster(word, cluster, clusters)
            _shift(table, old, after, before, itself, -1.0)
            gains = _insertion_gains(table, after, before, itself, first[word], second[word])
            best = int(gains.argmax())
            # a tie, or a gain no larger than rounding, is no reason to move: passes would not end
            new = best if gains[best] > gains[old] + 1e-6 else old
            _shift(table, new, after, before, itself, 1.0)
            if new != old:
                cluster[word] = new
                sizes[old] -= 1
                sizes[new] += 1
                moved = True
        if not moved:
            break
    return cluster


def _shift(table: np.ndarray, at: int, after: np.ndarray, before: np.ndarray, itself: float, sign: float) -> None:
    """Add (sign 1) or remove (sign −1) a word's bigrams at cluster `at`."""
    table[at] += sign * after
    table[:, at] += sign * before
    table[at, at] += sign * itself


def _insertion_gains(
    table: np.ndarray, after: np.ndarray, before: np.ndarray, itself: float, first: float, second: float
) -> np.ndarray:
    """[C] bigrams times nats of mutual information gained by putting a word, in no cluster so far, into each."""
    gains = np.zeros(len(table))
    for profile, rows in ((after, table), (before, table.T)):
        (some,) = profile.nonzero()
        counts = rows[:, some]
        grown = xlogx(counts + profile[some]) - xlogx(counts)
        gains += grown.sum(1)
        gains[some] -= grown[some, np.arange(len(some))]  # a cluster's bigrams with itself grow by both profiles
    loops = table.diagonal()
    gains += xlogx(loops + after + before + itself) - xlogx(loops)
    # the clusters' own words stand before and after the word wherever it goes: those bigrams count in the marginals
    for marginal, more in ((table.sum(1) + before, first), (table.sum(0) + after, second)):
        gains -= xlogx(marginal + more) - xlogx(marginal)
    return gains
