"""Brown clustering: a binary tree of word clusters, built by greedy merges that preserve mutual information.

The windowed algorithm of Liang (2005). The C most frequent words start as clusters of their own. Each further word,
in order of frequency, becomes cluster C+1, and the pair of clusters whose merge loses the least average mutual
information is merged. Finally the C clusters are merged down to one, which gives each its path in the tree.

With f(x) = x log x, bigram counts P between the clusters in the window, window sums R_i = Σ_k P_ik, C_i = Σ_k P_ki,
and counts l_i, r_i of cluster i as first and second word in the whole text, N times the mutual information is, up
to a constant,

    Σ f(P_ik) − Σ R_i log l_i − Σ C_i log r_i.

So the loss of merging i and j is a sum over the profiles of i and j of g(x, y) = f(x) + f(y) − f(x+y), which is 0 if
either count is 0, plus terms without a sum. `ClusterWindow` maintains the sums of all pairs. Adding or merging
a cluster updates only the pairs and columns in which the added cluster, or the sparser of the merged ones, has bigrams.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hmmlm.errors import InputError
from hmmlm.structure.bigrams import Bigrams, cluster_table, count_bigrams, mutual_information, xlogx
from hmmlm.structure.exchange import exchange


@dataclass(frozen=True)
class BrownClustering:
    """Clusters of words, numbered in the order of their paths."""

    cluster: np.ndarray  # [V] int64; −1 for words unseen in the clustering text
    paths: tuple[str, ...]  # a bit string for each cluster
    counts: np.ndarray  # [V] occurrences in the clustering text
    mutual_information: float | None = None  # average over bigrams, nats; None for clusters read from a file

    @property
    def clusters(self) -> int:
        return len(self.paths)

    def with_unseen_placed(self) -> np.ndarray:
        """Return a cluster for every word [V]; words unseen in the clustering text get the last one in path order.

        The text has no evidence on unseen words, so any fixed choice works. This is the choice of the code released
        with Chiu & Rush (2020), whose PTB clusters leave out `<eos>`: with it, the classic tool's files give the
        blocks of the published figures.
        """
        return np.where(self.cluster < 0, self.clusters - 1, self.cluster)


class ClusterWindow:
    """Clusters in slots 0..S−1, some of them free, and the loss of merging each pair."""

    def __init__(self, slots: int) -> None:
        self.table = np.zeros((slots, slots))  # P: bigram counts between the clusters in the window
        self.f_table = np.zeros((slots, slots))  # f(P)
        self.shared = np.zeros((slots, slots))  # Σ_k g(P_ik, P_jk) + g(P_ki, P_kj)
        self.corner = np.zeros((slots, slots))  # correction of `shared` at k = i and k = j, where row and column merge
        self.log_first = np.zeros((slots, slots))  # log(l_i + l_j)
        self.log_second = np.zeros((slots, slots))  # log(r_i + r_j)
        self.barrier = np.full((slots, slots), np.inf)  # 0 between two different clusters, ∞ elsewhere
        self.first = np.zeros(slots)  # l
        self.second = np.zeros(slots)  # r
        self.active = np.zeros(slots, dtype=bool)

    def add(self, slot: int, after: np.ndarray, before: np.ndarray, itself: float, first: float, second: float) -> None:
        """Add a cluster to a free slot.

        Args:
            after, before: [S] counts of each other cluster after and before it.
            itself: count of the cluster after itself.
            first, second: its counts as first and second word in the whole text.
        """
        for profile in (before, after):  # the pairs of other clusters share one more column and one more row
            (some,) = profile.nonzero()
            x, f = profile[some], xlogx(profile[some])
            self.shared[np.ix_(some, some)] += f[:, None] + f - xlogx(x[:, None] + x)
        self.table[slot], self.table[:, slot], self.table[slot, slot] = after, before, itself
        self.f_table[slot], self.f_table[:, slot] = xlogx(self.table[slot]), xlogx(self.table[:, slot])
        own = np.zeros(len(self.table))
        for table, f_table in ((self.table, self.f_table), (self.table.T, self.f_table.T)):
            (some,) = table[slot].nonzero()
            together = f_table[:, some] - xlogx(table[:, some] + table[slot, some])
            own += together.sum(1) + f_table[slot, some].sum()
        self.shared[slot] = self.shared[:, slot] = own
        self.first[slot], self.second[slot], self.active[slot] = first, second, True
        self._renew(slot)

    def merge(self, kept: int, gone: int) -> None:
        """Merge cluster `gone` into cluster `kept`; cheapest if `gone` is the one with fewer neighbors."""
        self._merge_columns(self.table, self.f_table, kept, gone)
        self._merge_columns(self.table.T, self.f_table.T, kept, gone)
        self.shared[gone] = self.shared[:, gone] = 0.0
        self.first[kept] += self.first[gone]
        self.second[kept] += self.second[gone]
        self.active[gone] = False
        self.barrier[gone] = self.barrier[:, gone] = np.inf
        self._renew(kept)

    def _merge_columns(self, table: np.ndarray, f_table: np.ndarray, kept: int, gone: int) -> None:
        """Add column `gone` of the table to column `kept`; only rows in which column `gone` is not 0 change."""
        (some,) = table[:, gone].nonzero()
        x, y = table[:, kept].copy(), table[:, gone].copy()
        total = x + y
        f_total = xlogx(total)
        # Rows i (some) and j (all): the term of the summed column replaces the terms of the two columns.
        change = f_total - f_table[:, kept] - f_table[:, gone]
        delta = change[some, None] + change - xlogx(total[some, None] + total)
        delta += xlogx(x[some, None] + x) + xlogx(y[some, None] + y)
        self.shared[some] += delta
        self.shared[:, some] = self.shared[some].T
        # Column `kept` itself against the other columns.
        own = xlogx(x[some, None] + table[some]) - xlogx(total[some, None] + table[some])
        self.shared[kept] += own.sum(0) + (f_total - f_table[:, kept])[some].sum()
        self.shared[:, kept] = self.shared[kept]
        table[:, kept], table[:, gone] = total, 0.0
        f_table[:, kept], f_table[:, gone] = f_total, 0.0

    def _renew(self, slot: int) -> None:
        """Recompute the terms without a sum for all pairs with this cluster."""
        out, into, both, loops = self.table[slot], self.table[:, slot], self.table[slot, slot], self.table.diagonal()
        f_loops, f_both = self.f_table.diagonal(), self.f_table[slot, slot]
        corner = xlogx(both + out) + xlogx(both + into) + xlogx(loops + out) + xlogx(loops + into)
        corner -= f_both + f_loops + self.f_table[slot] + self.f_table[:, slot] + xlogx(both + loops + out + into)
        self.corner[slot] = self.corner[:, slot] = corner
        for logs, marginal in ((self.log_first, self.first), (self.log_second, self.second)):
            logs[slot] = logs[:, slot] = np.log(np.maximum(marginal + marginal[slot], 1.0))
        self.barrier[slot] = self.barrier[:, slot] = np.where(self.active, 0.0, np.inf)
        self.barrier[slot, slot] = np.inf

    def losses(self) -> np.ndarray:
        """Return the loss of merging each pair [S, S], in nats of mutual information times bigrams; ∞ if not a pair."""
        rows, columns = self.table.sum(1), self.table.sum(0)
        alone = rows * np.log(np.maximum(self.first, 1.0)) + columns * np.log(np.maximum(self.second, 1.0))
        half = rows[:, None] * self.log_first + columns[:, None] * self.log_second - alone[:, None]
        return half + half.T + self.shared + self.corner + self.barrier

    def merge_best(self) -> tuple[int, int]:
        """Merge the pair with the smallest loss (the first of equals); return the slot kept and the slot freed."""
        pair = sorted(divmod(int(self.losses().argmin()), len(self.table)))
        neighbors = [np.count_nonzero(self.table[i]) + np.count_nonzero(self.table[:, i]) for i in pair]
        kept, gone = pair if neighbors[0] >= neighbors[1] else pair[::-1]
        self.merge(kept, gone)
        return kept, gone


def brown_clusters(
    tokens: np.ndarray,
    vocab_size: int,
    clusters: int,
    *,
    documents: np.ndarray | None = None,
    exchange_passes: int = 0,
    on_word: Callable[[int], None] = lambda words: None,
) -> BrownClustering:
    """Cluster the words of a text into at most `clusters` clusters, in O(V·C²).

    If the text has fewer distinct words than `clusters`, each word is a cluster.

    Args:
        tokens: [N] word ids; −1 is missing, and no bigram contains it. Replace a word by −1 to leave it out.
        documents: offsets at which documents start; no bigram crosses one.
        exchange_passes: passes over all words before the tree is built. A pass moves each word to the cluster that
            gives the most mutual information (Martin et al. 1998).
        on_word: called with 1 for each word that has been placed (progress).
    """
    if clusters < 1:
        raise InputError(f"clusters = {clusters}: it must be at least 1")
    bigrams = count_bigrams(tokens, vocab_size, documents)
    seen = int(np.count_nonzero(bigrams.counts))
    if seen == 0:
        raise InputError("the text to cluster has no words: give at least one token that is not missing (−1)")
    clusters = min(clusters, seen)
    slot_of = _merge_words(bigrams, clusters, on_word)
    if exchange_passes:
        slot_of = exchange(bigrams, slot_of, clusters, exchange_passes)
    table = cluster_table(bigrams, slot_of, clusters)
    paths = _tree_paths(table)
    order = sorted(range(clusters), key=paths.__getitem__)
    number = np.full(clusters + 1, -1)  # the extra entry maps slot −1 to −1
    number[order] = np.arange(clusters)
    return BrownClustering(
        cluster=number[slot_of],
        paths=tuple(paths[slot] for slot in order),
        counts=bigrams.counts,
        mutual_information=mutual_information(table),
    )


def _merge_words(bigrams: Bigrams, clusters: int, on_word: Callable[[int], None]) -> np.ndarray:
    """Return the slot 0..C−1 of each word [V], −1 if unseen; words enter the window by frequency, then by id."""
    first, second = bigrams.marginals()
    words = np.argsort(-bigrams.counts, kind="stable")[: np.count_nonzero(bigrams.counts)]
    slot_of = np.full(bigrams.vocab_size, -1)
    window = ClusterWindow(clusters + 1)
    free = 0
    for entered, word in enumerate(words.tolist(), start=1):
        after, before, itself = bigrams.by_cluster(word, slot_of, clusters + 1)
        window.add(free, after, before, itself, first[word], second[word])
        slot_of[word] = free
        if entered <= clusters:
            free = entered
        else:
            kept, free = window.merge_best()
            slot_of[slot_of == free] = kept
        on_word(1)
    slot_of[slot_of > free] -= 1  # close the gap of the last merge
    return slot_of


def _tree_paths(table: np.ndarray) -> list[str]:
    """Return a bit string for each of C clusters: 0 leads to the cluster that a merge kept, 1 to the other one."""
    clusters = len(table)
    window = ClusterWindow(clusters)
    first, second = table.sum(1), table.sum(0)
    for slot in range(clusters):
        before_it = np.arange(clusters) < slot
        after, before = np.where(before_it, table[slot], 0.0), np.where(before_it, table[:, slot], 0.0)
        window.add(slot, after, before, table[slot, slot], first[slot], second[slot])
    merges = [window.merge_best() for _ in range(clusters - 1)]
    paths = [""] * clusters
    for kept, gone in reversed(merges):  # from the root down; until it is split, a node has its path at its kept slot
        paths[kept], paths[gone] = paths[kept] + "0", paths[kept] + "1"
    return paths if clusters > 1 else ["0"]
