"""Brown clustering: a hierarchy of words that loses as little mutual information of neighbours as greed can.

The windowed algorithm of Liang (2005). The C most frequent words start as clusters of their own. Each further word,
by frequency, becomes cluster C+1, and the pair of clusters whose merge loses the least average mutual information
is merged. At the end the C clusters are merged down to one, which gives each its path in a binary tree.

With f(x) = x log x, bigram counts P between the clusters in the window, window sums R_i = Σ_k P_ik, C_i = Σ_k P_ki,
and counts l_i, r_i of cluster i as first and second word in the whole text, N times the information is, but for a
constant,

    Σ f(P_ik) − Σ R_i log l_i − Σ C_i log r_i.

So what a merge of i and j loses is a sum over the profiles of i and j of g(x, y) = f(x) + f(y) − f(x+y), which is 0
where either count is, plus terms that need no sum. `Window` keeps the sums for all pairs; adding or merging a cluster
touches only those pairs and columns where the added cluster, or the sparser of the merged, has bigrams at all.
"""

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
        """A cluster for every word ([V]): words unseen in the clustering text go to the last cluster in path order.

        The text says nothing about where they belong, so any fixed choice will do; this one is that of the code
        released with Chiu & Rush (2020), whose PTB clusters leave out `<eos>`, so that the classic tool's files give
        the blocks of the published figures.
        """
        return np.where(self.cluster < 0, self.clusters - 1, self.cluster)


class Window:
    """Clusters in slots 0..S−1, some of them free, and what merging each pair would lose."""

    def __init__(self, slots: int) -> None:
        self.table = np.zeros((slots, slots))  # P: bigram counts between the clusters in the window
        self.f_table = np.zeros((slots, slots))  # f(P)
        self.shared = np.zeros((slots, slots))  # Σ_k g(P_ik, P_jk) + g(P_ki, P_kj)
        self.corner = np.zeros((slots, slots))  # what `shared` gets wrong at k = i and k = j, where both sides merge
        self.log_first = np.zeros((slots, slots))  # log(l_i + l_j)
        self.log_second = np.zeros((slots, slots))  # log(r_i + r_j)
        self.barrier = np.full((slots, slots), np.inf)  # 0 between two different clusters, ∞ elsewhere
        self.first = np.zeros(slots)  # l
        self.second = np.zeros(slots)  # r
        self.active = np.zeros(slots, dtype=bool)

    def add(self, slot: int, after: np.ndarray, before: np.ndarray, itself: float, first: float, second: float) -> None:
        """Put a cluster into a free slot: counts of each cluster after it [S] and before it [S], of itself after
        itself, and its counts as first and second word in the whole text."""
        for profile in (before, after):  # the clusters already there now share one more column, and one more row
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
        """Merge cluster `gone` into cluster `kept`; cheapest when `gone` is the one with fewer neighbours."""
        self._merge_columns(self.table, self.f_table, kept, gone)
        self._merge_columns(self.table.T, self.f_table.T, kept, gone)
        self.shared[gone] = self.shared[:, gone] = 0.0
        self.first[kept] += self.first[gone]
        self.second[kept] += self.second[gone]
        self.active[gone] = False
        self.barrier[gone] = self.barrier[:, gone] = np.inf
        self._renew(kept)

    def _merge_columns(self, table: np.ndarray, f_table: np.ndarray, kept: int, gone: int) -> None:
        """Add column `gone` of the table to column `kept`; what does not change is where column `gone` is 0."""
        (some,) = table[:, gone].nonzero()
        x, y = table[:, kept].copy(), table[:, gone].copy()
        total = x + y
        f_total = xlogx(total)
        # rows i (some) and j (all) of which both columns were compared, now compared in their sum
        change = f_total - f_table[:, kept] - f_table[:, gone]
        delta = change[some, None] + change - xlogx(total[some, None] + total)
        delta += xlogx(x[some, None] + x) + xlogx(y[some, None] + y)
        self.shared[some] += delta
        self.shared[:, some] = self.shared[some].T
        # column `kept` itself, compared with the other columns
        own = xlogx(x[some, None] + table[some]) - xlogx(total[some, None] + table[some])
        self.shared[kept] += own.sum(0) + (f_total - f_table[:, kept])[some].sum()
        self.shared[:, kept] = self.shared[kept]
        table[:, kept], table[:, gone] = total, 0.0
        f_table[:, kept], f_table[:, gone] = f_total, 0.0

    def _renew(self, slot: int) -> None:
        """Compute again, for all pairs with this cluster, the terms without a sum."""
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
        """[S,S] what merging each pair loses: nats of average mutual information times bigrams; ∞ where no pair is."""
        rows, columns = self.table.sum(1), self.table.sum(0)
        alone = rows * np.log(np.maximum(self.first, 1.0)) + columns * np.log(np.maximum(self.second, 1.0))
        half = rows[:, None] * self.log_first + columns[:, None] * self.log_second - alone[:, None]
        return half + half.T + self.shared + self.corner + self.barrier

    def merge_best(self) -> tuple[int, int]:
        """Merge the pair that loses least (the first of equals); returns the slot kept and the slot set free."""
        pair = sorted(divmod(int(self.losses().argmin()), len(self.table)))
        neighbours = [np.count_nonzero(self.table[i]) + np.count_nonzero(self.table[:, i]) for i in pair]
        kept, gone = pair if neighbours[0] >= neighbours[1] else pair[::-1]
        self.merge(kept, gone)
        return kept, gone


def brown_clusters(
    tokens: np.ndarray,
    vocab_size: int,
    clusters: int,
    *,
    documents: np.ndarray | None = None,
    exchange_passes: int = 0,
) -> BrownClustering:
    """Cluster the words of a text into at most `clusters` clusters, in O(V·C²).

    tokens: [N] word ids; −1 is missing and no bigram reaches over it: replace a word by −1 to leave it out.
    documents: offsets at which documents start; no bigram crosses one.
    exchange_passes: how often, before the tree is built, to go over all words and move each to the cluster that
    gives the most mutual information (Martin et al. 1998).
    A text of fewer different words than `clusters` gives a cluster to each.
    """
    if clusters < 1:
        raise InputError(f"clusters = {clusters}: at least one is needed")
    bigrams = count_bigrams(tokens, vocab_size, documents)
    seen = int(np.count_nonzero(bigrams.counts))
    if seen == 0:
        raise InputError("the text to cluster has no words: give at least one token that is not missing (−1)")
    clusters = min(clusters, seen)
    slot_of = _merge_words(bigrams, clusters)
    if exchange_passes:
        slot_of = exchange(bigrams, slot_of, clusters, exchange_passes)
    table = cluster_table(bigrams, slot_of, clusters)
    paths = _tree_paths(table)
    order = sorted(range(clusters), key=paths.__getitem__)
    number = np.full(clusters + 1, -1)  # the extra entry answers slot −1
    number[order] = np.arange(clusters)
    return BrownClustering(
        cluster=number[slot_of],
        paths=tuple(paths[slot] for slot in order),
        counts=bigrams.counts,
        mutual_information=mutual_information(table),
    )


def _merge_words(bigrams: Bigrams, clusters: int) -> np.ndarray:
    """Slot 0..C−1 of each seen word ([V], −1 for unseen): words enter the window by frequency, then by id."""
    first, second = bigrams.marginals()
    words = np.argsort(-bigrams.counts, kind="stable")[: np.count_nonzero(bigrams.counts)]
    slot_of = np.full(bigrams.vocab_size, -1)
    window = Window(clusters + 1)
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
    slot_of[slot_of > free] -= 1  # close the gap the last merge left
    return slot_of


def _tree_paths(table: np.ndarray) -> list[str]:
    """A bit string for each of C clusters: 0 leads to the cluster a merge kept, 1 to the one that went into it."""
    clusters = len(table)
    window = Window(clusters)
    first, second = table.sum(1), table.sum(0)
    for slot in range(clusters):
        before_it = np.arange(clusters) < slot
        after, before = np.where(before_it, table[slot], 0.0), np.where(before_it, table[:, slot], 0.0)
        window.add(slot, after, before, table[slot, slot], first[slot], second[slot])
    merges = [window.merge_best() for _ in range(clusters - 1)]
    paths = [""] * clusters
    for kept, gone in reversed(merges):  # from the root down: until it is split, a node's path stands at its kept slot
        paths[kept], paths[gone] = paths[kept] + "0", paths[kept] + "1"
    return paths if clusters > 1 else ["0"]
