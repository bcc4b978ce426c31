"""The exchange algorithm: move words between clusters while the mutual information of neighbors increases."""

import numpy as np

from hmmlm.structure.bigrams import Bigrams, cluster_table, xlogx


def exchange(bigrams: Bigrams, cluster: np.ndarray, clusters: int, passes: int) -> np.ndarray:
    """Move each word to the cluster that gives the most average mutual information; return the new clusters [V].

    Words move one at a time, by frequency. A word alone in its cluster stays, so no cluster becomes empty.

    Args:
        cluster: [V] cluster of each word; −1 for words to leave out.
        passes: maximum number of passes; a pass that moves no word is the last.
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
            # Ties and gains within rounding error move no word, otherwise passes would not end.
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
    """Add (sign 1) or remove (sign −1) the bigrams of a word at cluster `at`."""
    table[at] += sign * after
    table[:, at] += sign * before
    table[at, at] += sign * itself


def _insertion_gains(
    table: np.ndarray, after: np.ndarray, before: np.ndarray, itself: float, first: float, second: float
) -> np.ndarray:
    """Compute the gain [C] of adding an unassigned word to each cluster: nats of mutual information times bigrams."""
    gains = np.zeros(len(table))
    for profile, rows in ((after, table), (before, table.T)):
        (some,) = profile.nonzero()
        counts = rows[:, some]
        grown = xlogx(counts + profile[some]) - xlogx(counts)
        gains += grown.sum(1)
        gains[some] -= grown[some, np.arange(len(some))]  # the diagonal grows by both profiles, and is added below
    loops = table.diagonal()
    gains += xlogx(loops + after + before + itself) - xlogx(loops)
    # The marginals of a cluster include its bigrams with the word, whichever cluster the word is added to.
    for marginal, more in ((table.sum(1) + before, first), (table.sum(0) + after, second)):
        gains -= xlogx(marginal + more) - xlogx(marginal)
    return gains
