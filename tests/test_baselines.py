"""Kneser-Ney n-grams: exact normalization, hand-computed values, a slow reading of the definition, order of quality."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmmlm.baselines.arpa import arpa_words, read_arpa, write_arpa
from hmmlm.baselines.ngram import NgramModel
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.errors import InputError

EOS = 0
VOCAB = 60


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    order=st.integers(1, 5),
    eos=st.sampled_from([None, 0, 3]),
    context=st.lists(st.integers(0, 6), max_size=6),
)
def test_probabilities_sum_to_one_for_every_context(
    tokens: list[int], order: int, eos: int | None, context: list[int]
) -> None:
    model = NgramModel(np.array(tokens), vocab_size=7, order=order, eos=eos)  # token 6 is never seen
    log_probs = model.next_token(np.array(context, dtype=np.int64))
    assert np.isfinite(log_probs).all()
    assert np.exp(log_probs).sum() == pytest.approx(1.0, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 4), min_size=2, max_size=50),
    text=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    order=st.integers(1, 4),
    eos=st.sampled_from([None, 0]),
)
def test_a_text_is_scored_as_its_tokens_are_predicted_one_by_one(
    tokens: list[int], text: list[int], order: int, eos: int | None
) -> None:
    model = NgramModel(np.array(tokens), 5, order, eos)
    one_by_one = [model.next_token(np.array(text[:i], dtype=np.int64))[text[i]] for i in range(len(text))]
    np.testing.assert_allclose(model.log_probs(np.array(text)), one_by_one, atol=1e-12)


def sentences(rng: np.random.Generator, count: int) -> list[int]:
    """Sentences of a small random bigram language whose words are as unevenly frequent as real ones, `<eos>` = 0."""
    table = rng.dirichlet(4 / np.arange(1, VOCAB + 1), size=VOCAB)
    tokens, last = [], 0
    while count:
        last = int(rng.choice(VOCAB, p=table[last]))
        tokens.append(last)
        count -= last == 0
    return tokens


def slow_kneser_ney(tokens: list[int], vocab: int, context: tuple[int, ...], word: int, order: int) -> float:
    """The textbook recursion over dictionaries, sentence by sentence, with `<s>` = -1 in front."""
    grams: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(order + 1)]
    sentence: list[int] = [-1]
    for token in tokens:
        sentence.append(token)
        for k in range(1, order + 1):
            if len(sentence) >= k and (k > 1 or sentence[-1] != -1):
                grams[k][tuple(sentence[-k:])] += 1
        if token == EOS:
            sentence = [-1]
    for k in range(1, order):  # lower orders: number of different tokens before
        before: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for gram in grams[k + 1]:
            before[gram[1:]].add(gram[0])
        grams[k] = Counter({g: len(before[g]) if g[0] != -1 else c for g, c in grams[k].items()})
    p = 1.0 / vocab
    history = (-1, *context)
    for k in range(1, order + 1):
        n = Counter(min(c, 5) for c in grams[k].values())
        y = n[1] / (n[1] + 2 * n[2])
        discount = {0: 0.0, **{j: j - (j + 1) * y * n[j + 1] / n[j] for j in (1, 2, 3)}}
        if len(history) < k - 1:
            break
        prefix = history[len(history) - (k - 1) :]
        followers = {g: c for g, c in grams[k].items() if g[:-1] == prefix}
        if not followers:
            break
        total = sum(followers.values())
        left = sum(discount[min(c, 3)] for c in followers.values()) / total
        c = followers.get((*prefix, word), 0)
        p = (c - discount[min(c, 3)]) / total + left * p
    return p


@pytest.mark.parametrize("order", [1, 2, 3])
def test_agrees_with_the_textbook_recursion(order: int) -> None:
    tokens = sentences(np.random.default_rng(1), 60)
    model = NgramModel(np.array(tokens), VOCAB, order, eos=EOS)
    for context in [(), (3,), (3, 5), (7, 1, 2), (11, 11)]:
        got = np.exp(model.next_token(np.array(context, dtype=np.int64)))
        want = [slow_kneser_ney(tokens, VOCAB, context, w, order) for w in range(0, VOCAB, 5)]
        np.testing.assert_allclose(got[::5], want, atol=1e-12)


def test_context_does_not_reach_across_eos_when_it_restarts() -> None:
    tokens = np.array(sentences(np.random.default_rng(2), 200))
    restart, runs_on = NgramModel(tokens, VOCAB, 3, eos=EOS), NgramModel(tokens, VOCAB, 3)
    for before in ([], [4], [7, 2]):
        np.testing.assert_array_equal(restart.next_token([*before, EOS, 5]), restart.next_token([EOS, 5]))
    assert not np.allclose(runs_on.next_token([4, EOS]), runs_on.next_token([7, EOS]))


def test_higher_orders_are_better_on_text_that_has_structure() -> None:
    rng = np.random.default_rng(3)
    # A language of order two: the next token is a fixed function of the last two, or noise.
    table, tokens = rng.integers(1, 20, size=(20, 20)), [0, 0]
    for _ in range(20_000):
        noise = rng.random() < 0.2
        tokens.append(int(rng.integers(0, 20)) if noise else int(table[tokens[-2], tokens[-1]]))
    train, test = np.array(tokens[:18_000]), np.array(tokens[18_000:])
    unigram, bigram, trigram = (NgramModel(train, 20, n).perplexity(test) for n in (1, 2, 3))
    assert unigram > bigram > trigram
    counts = np.bincount(train, minlength=20) / len(train)
    assert unigram == pytest.approx(np.exp(-np.log(counts[test]).mean()), rel=1e-3)


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="token 7 at position 1 is outside the vocabulary of 5"):
        NgramModel(np.array([1, 7]), 5, 2)
    with pytest.raises(InputError, match="flat array of integers"):
        NgramModel(np.array([1.0]), 5, 2)
    with pytest.raises(InputError, match="at least 1"):
        NgramModel(np.array([1]), 5, 0)
    with pytest.raises(InputError, match="empty"):
        NgramModel(np.array([], dtype=np.int64), 5, 1)
    with pytest.raises(InputError, match="no perplexity"):
        NgramModel(np.array([1]), 5, 1).perplexity(np.array([], dtype=np.int64))


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    text=st.lists(st.integers(0, 5), min_size=1, max_size=20),
    order=st.integers(1, 4),
    restarts=st.booleans(),
)
def test_an_arpa_file_has_the_same_probabilities(
    tokens: list[int], text: list[int], order: int, restarts: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = WordTokenizer(["<eos>", "<unk>", "a", "b", "<s>", "d"])
    words = arpa_words(tokenizer, restarts)
    model = NgramModel(np.array(tokens), len(words), order, EOS if restarts else None)
    path = tmp_path_factory.mktemp("arpa") / "model.arpa"
    write_arpa(path, model, words)
    np.testing.assert_allclose(read_arpa(path, words).log_probs(np.array(text)), model.log_probs(text), rtol=1e-9)


def test_kenlm_scores_the_sentences_of_an_arpa_file_alike(tmp_path: Path) -> None:
    """The scores of words are added here: kenlm's score of a sentence is a sum in float32, 4e-4 off at 400 words."""
    kenlm = pytest.importorskip("kenlm", reason="kenlm is not installed")
    chance = np.random.default_rng(0)
    words = arpa_words(WordTokenizer(["<eos>", "<unk>", *(f"w{i}" for i in range(50))]), True)
    text = [chance.choice(50, 20, p=(chances := 1 / np.arange(1, 51)) / chances.sum()) + 2 for _ in range(2000)]
    ended = [np.append(sentence, EOS) for sentence in text]
    model = NgramModel(np.concatenate(ended[:1000]), len(words), 5, EOS)
    write_arpa(tmp_path / "model.arpa", model, words)
    theirs = kenlm.Model(str(tmp_path / "model.arpa"))
    for sentence, tokens in zip(text[1000:], ended[1000:], strict=True):
        scored = [score for score, *_ in theirs.full_scores(" ".join(words[i] for i in sentence))]
        ours = model.log_probs(tokens) / np.log(10)
        np.testing.assert_allclose(scored, ours, atol=1e-5)
        assert sum(scored) == pytest.approx(ours.sum(), abs=1e-4)


def test_an_arpa_file_of_another_program(tmp_path: Path) -> None:
    """Hand-computed: a backoff bigram, which is not interpolated."""
    path, words = tmp_path / "model.arpa", arpa_words(WordTokenizer(["<eos>", "<unk>", "a", "b"]), True)
    text = (
        "\\data\\\nngram 1=5\nngram 2=2\n\n\\1-grams:\n-1.0 <unk>\n-99 <s> -0.5\n-0.5 </s>\n-0.4 a -0.2\n-0.6 b\n\n"
        "\\2-grams:\n-0.1 <s> a\n-0.3 a b\n\n\\end\\\n"
    )
    path.write_text(text)
    found = read_arpa(path, words).log_probs([2, 3, 0, 3, 2, 2]) / np.log(10)
    np.testing.assert_allclose(found, [-0.1, -0.3, -0.5, -0.5 - 0.6, -0.4, -0.2 - 0.4])
    for wrong, message in (
        (text.replace("-0.3 a b\n", ""), "1 2-grams, not 2"),
        (text.replace("-0.6 b", "-0.6 c"), "the word 'c', which is not in the vocabulary"),
        (text.replace("-0.4 a -0.2", "-0.4 a b c"), "is not a 1-gram"),
        (text.replace("-0.6 b\n", "").replace("1=5", "1=4"), "no unigram 'b'"),
        (text.replace("-0.6 b\n", "-0.6 b\n-0.6 b\n").replace("1=5", "1=6"), "a 1-gram twice"),
        (text.replace("-0.3 a b\n", "-0.3 a b\n" * 2).replace("2=2", "2=3"), "a 2-gram twice"),
        (text.replace("-0.4 a -0.2", "-0.4 a inf"), "is not a 1-gram"),
        (text.replace("ngram 1=5\nngram 2=2\n", "ngram 2=2\nngram 1=5\n"), "'ngram 2=2' where the number of 1-grams"),
    ):
        path.write_text(wrong)
        with pytest.raises(InputError, match=message):
            read_arpa(path, words)
