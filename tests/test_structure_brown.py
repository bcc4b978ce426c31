"""Brown clustering against a greedy reference that computes the mutual information of every candidate from scratch."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hmmlm.errors import InputError
from hmmlm.structure.bigrams import (
    average_mutual_information,
    cluster_table,
    count_bigrams,
    mutual_information,
    xlogx,
)
from hmmlm.structure.brown import BrownClustering, ClusterWindow, brown_clusters
from hmmlm.structure.exchange import exchange
from hmmlm.structure.paths import read_paths, write_paths

texts = st.tuples(st.integers(0, 2**31), st.integers(4, 12), st.integers(30, 300), st.floats(0.0, 0.2))


def make_text(seed: int, vocab_size: int, length: int, missing: float) -> np.ndarray:
    """Tokens of a skewed bigram chain, some of them missing."""
    random = np.random.default_rng(seed)
    chain = random.dirichlet(np.full(vocab_size, 0.3), size=vocab_size).cumsum(1)
    tokens = [0]
    for u in random.random(length - 1):
        tokens.append(min(int(np.searchsorted(chain[tokens[-1]], u)), vocab_size - 1))
    return np.where(random.random(length) < missing, -1, tokens)


def pair_counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    counts = np.zeros((vocab_size, vocab_size))
    for a, b in itertools.pairwise(tokens.tolist()):
        if a >= 0 and b >= 0:
            counts[a, b] += 1
    return counts


def information(counts: np.ndarray, groups: list[list[int]]) -> float:
    """Bigrams times the information among these groups of words, marginals of the whole text, from the definition."""
    total = 0.0
    n = counts.sum()
    for left, right in itertools.product(groups, groups):
        joint = counts[np.ix_(left, right)].sum()
        if joint > 0:
            total += joint * np.log(joint * n / (counts[left].sum() * counts[:, right].sum()))
    return total


def merged(groups: list[list[int]], i: int, j: int) -> list[list[int]]:
    return [group for g, group in enumerate(groups) if g not in (i, j)] + [groups[i] + groups[j]]


@given(texts, st.integers(2, 5))
@settings(max_examples=40, deadline=None)
def test_every_loss_of_the_window_is_the_recomputed_one_at_every_step(text, size):
    """Add words and merge pairs as the algorithm does; compare all pairs with the definition each time."""
    tokens = make_text(*text)
    vocab_size = text[1]
    counts = pair_counts(tokens, vocab_size)
    bigrams = count_bigrams(tokens, vocab_size)
    first, second = bigrams.marginals()
    np.testing.assert_array_equal(first, counts.sum(1))
    np.testing.assert_array_equal(second, counts.sum(0))
    window, slot_of, free = ClusterWindow(size), np.full(vocab_size, -1), 0
    running = 0.0

    def check() -> list[list[int]]:
        groups = [np.flatnonzero(slot_of == slot).tolist() for slot in range(size)]
        losses, now = window.losses(), information(counts, groups)
        for i, j in itertools.combinations(range(size), 2):
            if groups[i] and groups[j]:
                expected = now - information(counts, merged(groups, i, j))
                assert losses[i, j] == losses[j, i] == pytest.approx(expected, abs=1e-8)
            else:
                assert losses[i, j] == losses[j, i] == np.inf
        return groups

    for word in range(vocab_size):
        after, before, itself = bigrams.by_cluster(word, slot_of, size)
        window.add(free, after, before, itself, first[word], second[word])
        slot_of[word] = free
        groups = check()
        if word + 1 < size:
            free += 1
            continue
        running, loss = information(counts, groups), window.losses().min()
        kept, free = window.merge_best()
        slot_of[slot_of == free] = kept
        groups = check()
        assert information(counts, groups) == pytest.approx(running - loss, abs=1e-8)


def greedy(tokens: np.ndarray, vocab_size: int, clusters: int) -> list[list[int]]:
    """The algorithm, from its definition; the caller chooses texts without ties."""
    counts = pair_counts(tokens, vocab_size)
    occurrences = np.bincount(tokens[tokens >= 0], minlength=vocab_size)
    groups: list[list[int]] = []
    for word in np.argsort(-occurrences, kind="stable").tolist():
        groups.append([word])
        if len(groups) > clusters:
            pairs = list(itertools.combinations(range(len(groups)), 2))
            ranked = sorted((-information(counts, merged(groups, i, j)), i, j) for i, j in pairs)
            assert ranked[1][0] - ranked[0][0] > 1e-6, "a tie: not a text to compare on"
            groups = merged(groups, *ranked[0][1:])
    return groups


@pytest.mark.parametrize("clusters", [2, 3, 6])
def test_clusters_are_those_of_the_brute_force_greedy_algorithm(clusters):
    tokens = make_text(7, 20, 3000, 0.0)
    ours = brown_clusters(tokens, 20, clusters)
    expected = greedy(tokens, 20, clusters)
    found = [np.flatnonzero(ours.cluster == c).tolist() for c in range(ours.clusters)]
    assert sorted(map(sorted, expected)) == sorted(found)
    table = information(pair_counts(tokens, 20), expected) / (len(tokens) - 1)
    assert ours.mutual_information == pytest.approx(table, abs=1e-12)


def test_planted_classes_are_found():
    """Words of six classes in a cycle with noise."""
    random = np.random.default_rng(0)
    classes = np.where(random.random(30_000) < 0.1, random.integers(0, 6, 30_000), np.arange(30_000) % 6)
    tokens = classes * 10 + random.choice(10, 30_000, p=np.arange(1, 11) / 55)
    ours = brown_clusters(tokens, 60, 6)
    planted = np.arange(60) // 10
    assert len(set(zip(ours.cluster.tolist(), planted.tolist(), strict=True))) == 6
    assert ours.mutual_information == pytest.approx(average_mutual_information(tokens, planted))


def test_paths_are_the_leaves_of_a_binary_tree_built_by_the_best_merges():
    tokens = make_text(3, 15, 2000, 0.0)
    ours = brown_clusters(tokens, 15, 6)
    assert list(ours.paths) == sorted(set(ours.paths))
    assert sum(2.0 ** -len(path) for path in ours.paths) == 1.0  # prefix-free and complete
    counts = pair_counts(tokens, 15)
    groups = [np.flatnonzero(ours.cluster == c).tolist() for c in range(6)]
    best = max(itertools.combinations(range(6), 2), key=lambda pair: information(counts, merged(groups, *pair)))
    assert ours.paths[best[0]][:-1] == ours.paths[best[1]][:-1]  # the cheapest merge is the first: siblings


def test_as_many_clusters_as_words_or_one():
    tokens = np.array([0, 2, 0, 3, 2, 0])
    every = brown_clusters(tokens, 5, 100)
    assert every.cluster[1] == every.cluster[4] == -1
    assert sorted(every.cluster[[0, 2, 3]].tolist()) == [0, 1, 2]
    one = brown_clusters(tokens, 5, 1)
    assert one.cluster.tolist() == [0, -1, 0, 0, -1] and one.paths == ("0",)
    assert one.mutual_information == pytest.approx(0.0, abs=1e-12)


def test_bigrams_of_a_large_text_are_counted_in_pieces():
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random(1000) < 0.05, -1, rng.zipf(1.5, 1000) % 50)
    documents = np.sort(rng.choice(1000, 40, replace=False))
    whole = count_bigrams(tokens, 50, documents)
    for piece in (1, 7, 64, 999, 1000):
        found = count_bigrams(tokens, 50, documents, piece)
        for ours, theirs in zip(vars(found).values(), vars(whole).values(), strict=True):
            assert np.array_equal(ours, theirs)


def test_a_word_without_a_bigram_is_clustered_all_the_same():
    alone = brown_clusters(np.array([0, 1, 0, 1, -1, 2, -1, 0]), 3, 2)
    assert (alone.cluster >= 0).all()
    assert alone.counts.tolist() == [3, 2, 1]


def test_unseen_words_go_to_the_last_cluster_and_no_other_word_moves():
    ours = brown_clusters(make_text(1, 8, 400, 0.0), 10, 3)
    placed = ours.with_unseen_placed()
    assert ours.cluster[8:].tolist() == [-1, -1]
    assert placed[8:].tolist() == [2, 2]
    np.testing.assert_array_equal(placed[:8], ours.cluster[:8])


def test_no_bigram_crosses_a_missing_token_or_the_start_of_a_document():
    tokens = np.array([0, 1, 2, 0, 1, 2])
    cut = np.array([0, 1, 2, -1, 0, 1, 2])
    by_documents = count_bigrams(tokens, 3, documents=np.array([0, 3, 6]))
    by_missing = count_bigrams(cut, 3)
    expected = [[0, 2, 0], [0, 0, 2], [0, 0, 0]]
    for bigrams in (by_documents, by_missing):
        assert cluster_table(bigrams, np.arange(3), 3).tolist() == expected
        assert bigrams.counts.tolist() == [2, 2, 2]
    cluster = np.array([0, 1, 1])
    assert average_mutual_information(tokens, cluster, documents=np.array([3])) == pytest.approx(
        mutual_information(np.array([[0.0, 2.0], [0.0, 2.0]]))
    )


def test_mutual_information_of_known_tables():
    assert mutual_information(np.eye(4)) == pytest.approx(np.log(4))  # nats
    assert mutual_information(np.outer([1, 2, 3], [4, 5])) == pytest.approx(0.0, abs=1e-12)
    assert mutual_information(np.zeros((2, 2))) == 0.0
    assert xlogx(np.array([0.0, 1.0, 2.0])).tolist() == [0.0, 0.0, 2 * np.log(2)]


def test_words_of_no_cluster_count_as_missing():
    tokens = np.array([0, 1, 2, 1, 0, 1, 1, 0])
    without = average_mutual_information(tokens, np.array([0, 1, -1]))
    assert without == pytest.approx(average_mutual_information(np.where(tokens == 2, -1, tokens), np.array([0, 1, 0])))


@given(texts)
@settings(max_examples=15, deadline=None)
def test_exchange_never_loses_ends_where_no_single_move_gains_and_empties_no_cluster(text):
    tokens, vocab_size = make_text(*text), text[1]
    bigrams = count_bigrams(tokens, vocab_size)
    cluster = np.where(bigrams.counts > 0, np.arange(vocab_size) % 3, -1)
    clusters = int(cluster.max()) + 1
    assume(set(range(clusters)) <= set(cluster.tolist()))
    after = exchange(bigrams, cluster, clusters, passes=100)
    np.testing.assert_array_equal(after < 0, cluster < 0)
    assert set(range(clusters)) <= set(after.tolist())
    scale = max(1.0, pair_counts(tokens, vocab_size).sum())
    best = average_mutual_information(tokens, after) * scale
    assert best >= average_mutual_information(tokens, cluster) * scale - 1e-6
    for word, new in itertools.product(np.flatnonzero(after >= 0), range(clusters)):
        other = after.copy()
        other[word] = new
        if set(range(clusters)) <= set(other.tolist()):
            assert average_mutual_information(tokens, other) * scale <= best + 2e-6


def test_exchange_passes_give_more_information_than_merging_alone():
    tokens = make_text(11, 60, 4000, 0.0)
    plain, refined = brown_clusters(tokens, 60, 6), brown_clusters(tokens, 60, 6, exchange_passes=20)
    assert refined.mutual_information > plain.mutual_information
    assert refined.mutual_information == pytest.approx(average_mutual_information(tokens, refined.cluster))


def test_the_same_text_gives_the_same_clusters():
    tokens = make_text(5, 40, 1500, 0.1)
    one, two = (brown_clusters(tokens, 40, 7, exchange_passes=2) for _ in range(2))
    np.testing.assert_array_equal(one.cluster, two.cluster)
    assert one.paths == two.paths


def test_bad_texts_are_named():
    with pytest.raises(InputError, match="token 5 is outside the vocabulary of 5 words"):
        brown_clusters(np.array([0, 5]), 5, 2)
    with pytest.raises(InputError, match="token -2 is outside the vocabulary of 3 words"):
        average_mutual_information(np.array([0, -2]), np.array([0, 0, 1]))
    with pytest.raises(InputError, match="clusters = 0"):
        brown_clusters(np.array([0, 1]), 5, 0)
    with pytest.raises(InputError, match="has no words"):
        brown_clusters(np.array([-1, -1]), 5, 2)


# paths files

WORDS = ["the", "a", "naïve", "x\u2028y", "<eos>"]


def test_paths_round_trip(tmp_path):
    file = tmp_path / "paths"
    ours = brown_clusters(np.array([0, 2, 1, 3, 0, 3, 1, 2, 0, 2]), 5, 3)
    write_paths(file, ours, WORDS)
    back = read_paths(file, WORDS)
    np.testing.assert_array_equal(back.cluster, ours.cluster)
    np.testing.assert_array_equal(back.counts, ours.counts)
    assert back.paths == ours.paths and back.mutual_information is None
    assert back.cluster[4] == -1


def test_paths_files_are_written_as_the_classic_tool_writes_them(tmp_path):
    clusters = BrownClustering(np.array([1, 0, 1, 0, -1]), ("0", "10"), np.array([9, 2, 4, 1, 0]))
    write_paths(tmp_path / "p", clusters, WORDS)
    assert (tmp_path / "p").read_text("utf-8") == "0\tx\u2028y\t1\n0\ta\t2\n10\tnaïve\t4\n10\tthe\t9\n"


def test_clusters_read_are_numbered_by_path_whatever_the_order_of_lines(tmp_path):
    (tmp_path / "p").write_bytes("11\tthe\t9\r\n0\ta\t2\r\n10\tnaïve\t4\r\n".encode())
    read = read_paths(tmp_path / "p", WORDS)
    assert read.paths == ("0", "10", "11")
    assert read.cluster.tolist() == [2, 0, 1, -1, -1]
    assert read.counts.tolist() == [9, 2, 4, 0, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0\tthe\t9\n1\ta\t2\n10\tthe\t9\n", "line 3: word 'the' occurs twice"),
        ("0\tthe\t9\n1 a 2\n", r"line 2: expected 'bits<TAB>word<TAB>count', found '1 a 2'"),
        ("0\tthe\t9\n012\ta\t2\n", "line 2: expected"),
        ("0\tthe\tmany\n", "line 1: expected"),
        ("0\tthe\t9\n\n0\ta\t2\n", "line 2: expected"),
        ("0\tder\t9\n1\tthe\t3\n1\tdie\t2\n", r"2 of 3 words are not in the vocabulary of 5 words \('der', 'die'\)"),
        ("0\ta\t9\n" + "".join(f"1\tw{i}\t1\n" for i in range(7)), r"7 of 8 .*'w0', 'w1', 'w2', 'w3', 'w4', …\)"),
        ("", "the file has no clusters"),
    ],
)
def test_bad_paths_files_are_named_with_their_line(tmp_path, content, message):
    (tmp_path / "bad.paths").write_text(content, "utf-8")
    with pytest.raises(InputError, match=message) as error:
        read_paths(tmp_path / "bad.paths", WORDS)
    assert "bad.paths" in str(error.value) and "\n" not in str(error.value)


def test_unreadable_paths_files_and_unwritable_words_are_named(tmp_path):
    with pytest.raises(InputError, match=r"none: cannot read this paths file: No such file"):
        read_paths(tmp_path / "none", WORDS)
    (tmp_path / "binary").write_bytes(b"0\tthe\t1\n\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8 text at byte 8"):
        read_paths(tmp_path / "binary", WORDS)
    ours = brown_clusters(np.array([0, 1, 0]), 2, 2)
    with pytest.raises(InputError, match="2 words are clustered, the vocabulary has 5"):
        write_paths(tmp_path / "p", ours, WORDS)
    with pytest.raises(InputError, match=r"word 1 \('a\\tb'\) cannot be in a paths file"):
        write_paths(tmp_path / "p", ours, ["the", "a\tb"])
