"""Components that follow recent words, beside their definitions."""

import pytest
import torch
from helpers.oracle import random_blocked_hmm, random_hmm

from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel
from hmmlm.lm.predictors import HmmPredictor
from hmmlm.lm.recent import _PRIOR, _SHARE, AdaptedHmmPredictor, RecentPredictor

WORDS, HALF_LIFE, SIZE = 6, 3, 24
TOKENIZER = WordTokenizer(["<unk>", "<eos>", "a", "b", "c", "d"])
TEXT = torch.randint(WORDS, (70,), generator=torch.Generator().manual_seed(0)).tolist()
FREQUENCIES = torch.tensor([3.0, 1, 2, 2, 1, 1])


def weights_at(t: int, size: int = SIZE) -> list[tuple[int, float]]:
    """Return the positions of recent words before t, and their weights."""
    return [(i, 2 ** (-(t - 1 - i) / HALF_LIFE)) for i in range(max(0, t - size), t)]


def models() -> dict[str, HMM]:
    dense, blocked = HMM.from_probs(*random_hmm(3, WORDS, seed=1)), random_blocked_hmm(2, 2, WORDS, seed=3)
    impossible = HMM.from_probs(*random_hmm(3, WORDS, seed=2, zeros=0.6))
    return {"dense": dense, "blocked": blocked, "union": HMM.union([dense, blocked]), "impossible": impossible}


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("name", ["dense", "blocked", "union"])
@pytest.mark.parametrize("words", [None, torch.tensor([4, 1, 3])])
def test_predictions_are_those_after_each_prefix(name: str, missing: bool, words: torch.Tensor | None) -> None:
    hmm, lengths = models()[name], [5, 1, 7, 5]
    tokens = torch.tensor(TEXT[:28]).view(4, 7)
    if missing:
        tokens = tokens.masked_fill(tokens == 2, -1)
    seen = set()
    for sequences, steps, possible, observed, probs in hmm.predictions(tokens, lengths, words):
        assert bool(possible.all())
        for b, t, log_prob, row in zip(sequences.tolist(), steps.tolist(), observed, probs, strict=True):
            want = hmm.next_token(tokens[b : b + 1, :t])[0] if t else hmm.emit(hmm.begin())
            torch.testing.assert_close(row, want.exp() if words is None else want.exp()[words], atol=1e-6, rtol=1e-4)
            if tokens[b, t] >= 0:
                torch.testing.assert_close(log_prob, want[tokens[b, t]], atol=1e-5, rtol=1e-4)
            seen.add((b, t))
    assert seen == {(b, t) for b, length in enumerate(lengths) for t in range(length)}


def test_recent_words_by_definition() -> None:
    found = RecentPredictor(HALF_LIFE, WORDS).token_log_probs([TEXT, []])
    assert len(found[1]) == 0
    for t, word in enumerate(TEXT):
        want = 1 / WORDS
        for k in range(3):
            own = [(i, w) for i, w in weights_at(t, 100) if i >= k and t >= k and TEXT[i - k : i] == TEXT[t - k : t]]
            matched, total = sum(w for i, w in own if TEXT[i] == word), sum(w for _, w in own)
            prior = _PRIOR if k else float(not own)
            want = (matched + prior * want) / (total + prior)
        assert float(found[0][t].exp()) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("restarts", [False, True])
def test_an_adapted_hmm_by_definition(name: str, restarts: bool) -> None:
    lm = LanguageModel(models()[name], TOKENIZER, {"batches": {"kind": "stream", "eval_reset_at_eos": restarts}})
    plain, adapted = HmmPredictor(lm), AdaptedHmmPredictor(lm, HALF_LIFE, FREQUENCIES)
    empty, found, _ = adapted.token_log_probs([[], TEXT, TEXT[:9]])
    context = plain.begin()
    assert len(empty) == 0
    for t, word in enumerate(TEXT):
        recent = torch.zeros(WORDS, dtype=torch.float64)
        for i, weight in weights_at(t):
            recent[TEXT[i]] += weight
        ratio = recent / recent.sum() / (FREQUENCIES / FREQUENCIES.sum()) if t else torch.ones(WORDS)
        scores = plain.next_token(context).exp() * (1 - _SHARE + _SHARE * ratio)
        assert float(found[t].exp()) == pytest.approx(float(scores[word] / scores.sum()), abs=1e-5)
        context = plain.advance(context, word)


def test_words_that_were_frequent_become_likely() -> None:
    lm = LanguageModel(models()["dense"], TOKENIZER)
    adapted, repeated = AdaptedHmmPredictor(lm, 10, FREQUENCIES), [2, 3, 2, 3] * 20
    gain = adapted.token_log_probs([repeated])[0] - HmmPredictor(lm).token_log_probs([repeated])[0]
    assert float(gain[0]) == pytest.approx(0, abs=1e-6) and bool((gain[20:] > 0.2).all())


@pytest.mark.parametrize("frequencies", [torch.ones(WORDS - 1), torch.zeros(WORDS), torch.full((WORDS,), torch.inf)])
def test_every_word_needs_a_frequency(frequencies: torch.Tensor) -> None:
    with pytest.raises(InputError, match="frequencies must be 6 positive numbers"):
        AdaptedHmmPredictor(LanguageModel(models()["dense"], TOKENIZER), 3, frequencies)
    with pytest.raises(InputError, match="half_life"):
        RecentPredictor(0, WORDS)
