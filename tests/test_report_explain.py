"""Explanations of states and texts."""

import math
from io import StringIO

import pytest
import torch
from helpers.report_models import WORDS, sentence_model
from rich.console import Console

from hmmlm.data.words import WordTokenizer
from hmmlm.emissions import Blocked
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.lm.embeddings import stationary
from hmmlm.lm.lm import LanguageModel
from hmmlm.report.explain import explain_states, explain_text, similar_order
from hmmlm.report.tables import path_table
from hmmlm.transitions import Factored


def test_stationary_distribution_is_invariant() -> None:
    generator = torch.Generator().manual_seed(0)
    hmm = HMM(*((2 * torch.randn(s, generator=generator)).log_softmax(-1) for s in ((7,), (7, 7), (7, 3))))
    start, transition, _ = (log_probs.double().exp() for log_probs in hmm.tensors().values())
    mass = stationary(start, transition)
    torch.testing.assert_close(mass @ transition, mass, atol=1e-6, rtol=0)
    assert float(mass.sum()) == pytest.approx(1)
    # a cycle, on which power iteration with A alone would never converge
    torch.testing.assert_close(explain_states(sentence_model()).mass, torch.full((4,), 0.25, dtype=torch.float64))


def test_stationary_distribution_of_slow_and_of_disconnected_chains() -> None:
    slow = torch.tensor([[1 - 1e-7, 1e-7], [3e-7, 1 - 3e-7]], dtype=torch.float64)
    start = torch.tensor([0.0, 1.0], dtype=torch.float64)
    want = torch.tensor([0.75, 0.25], dtype=torch.float64)
    torch.testing.assert_close(stationary(start, slow), want, atol=1e-6, rtol=0)
    excess = (slow * (1 + 1e-7)).float()  # rows sum to one only to float32 precision
    assert float(stationary(start.float(), excess).sum()) == pytest.approx(1)
    # two components: the start distribution decides
    disconnected = torch.block_diag(torch.eye(2).roll(1, 0), torch.full((2, 2), 0.5)).double()
    mass = stationary(torch.tensor([0.6, 0, 0.4, 0], dtype=torch.float64), disconnected)
    torch.testing.assert_close(mass, torch.tensor([0.3, 0.3, 0.2, 0.2], dtype=torch.float64))


def test_the_start_distribution_follows_eos_where_the_chain_restarts() -> None:
    """State 1 ends a sentence half of the time; the transition out of it leads to state 2, which restarts avoid."""
    hmm = HMM.from_probs([1, 0, 0], [[0, 1, 0], [0, 0, 1], [1, 0, 0]], [[0, 0, 1], [0, 0.5, 0.5], [1, 0, 0.0]])
    config = {"batches": {"kind": "stream", "eval_reset_at_eos": True}}
    summary = explain_states(LanguageModel(hmm, WordTokenizer(WORDS[:3]), config))
    torch.testing.assert_close(summary.transition[1], torch.tensor([0.5, 0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(summary.mass, torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64), atol=1e-6, rtol=0)


def test_telling_words_are_neither_the_frequent_nor_the_rare() -> None:
    """Both states emit `the` most often; `cat` and `dog` distinguish them; `runs` is rarer still."""
    emission = [[0, 0, 0.70, 0.28, 0.0, 0.02], [0, 0, 0.70, 0.0, 0.30, 0.0]]
    hmm = HMM.from_probs([0.5, 0.5], [[0.5, 0.5], [0.5, 0.5]], emission)
    summary = explain_states(LanguageModel(hmm, WordTokenizer(WORDS)), words=2)
    assert summary.words[0].tolist() == [3, 5]
    assert summary.words[1].tolist() == [4, -1]  # no second word distinguishes state 1


def test_most_used_states_come_first() -> None:
    hmm = HMM.from_probs([1, 0], [[0.1, 0.9], [0.3, 0.7]], torch.full((2, 2), 0.5))
    summary = explain_states(LanguageModel(hmm, WordTokenizer(WORDS[:2])))
    assert summary.order.tolist() == [1, 0]
    torch.testing.assert_close(summary.mass, torch.tensor([0.25, 0.75], dtype=torch.float64), atol=1e-6, rtol=0)


def test_a_blocked_model_is_explained_as_its_dense_form() -> None:
    generator = torch.Generator().manual_seed(0)
    u, w, start = (torch.randn(shape, generator=generator) for shape in ((4, 3), (4, 3), (4,)))
    block_of_word = torch.tensor([0, 1, 0, 1, 0, 1])
    emission = torch.randn(6, 2, generator=generator).view(3, 2, 2).log_softmax(0).view(6, 2)
    blocked = HMM(start.log_softmax(0), Factored(u, w), Blocked(emission, block_of_word))
    dense = blocked.dense()
    assert dense.dense() is dense
    of_blocked, of_dense = (explain_states(LanguageModel(hmm, WordTokenizer(WORDS))) for hmm in (blocked, dense))
    torch.testing.assert_close(of_blocked.transition, of_dense.transition)
    torch.testing.assert_close(of_blocked.mass, of_dense.mass)
    assert torch.equal(of_blocked.words, of_dense.words)


def test_a_sentence_is_explained_token_by_token() -> None:
    explanation = explain_text(sentence_model(), "the unicorn runs")
    assert explanation.tokens == [2, 0, 5, 1]
    assert explanation.states == [0, 1, 2, 3]
    torch.testing.assert_close(explanation.posterior, torch.eye(4))
    assert explanation.log_prob == pytest.approx(math.log(0.2))
    with pytest.raises(InputError, match="at least one word"):
        explain_text(sentence_model(), "")


@pytest.mark.parametrize("restarts", [False, True])
def test_a_text_is_split_into_sequences_as_for_perplexity(restarts: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logs = ((2 * torch.randn(s, generator=generator)).double().log_softmax(-1) for s in ((3,), (3, 3), (3, 6)))
    config = {"batches": {"kind": "stream", "eval_reset_at_eos": restarts}}
    lm = LanguageModel(HMM(*logs), WordTokenizer(WORDS), config)
    text = "the cat runs\nthe dog\ncat"
    explanation = explain_text(lm, text)
    assert explanation.tokens == lm.encode(text)
    assert math.exp(-explanation.log_prob / len(explanation.tokens)) == pytest.approx(lm.perplexity([text]))
    parts = [explain_text(lm, line) for line in text.split("\n")]
    apart = torch.cat([part.posterior for part in parts])
    assert torch.allclose(explanation.posterior, apart) == restarts
    if restarts:
        assert explanation.states == [state for part in parts for state in part.states]
    out = StringIO()
    Console(file=out, width=100).print(path_table(lm, explain_states(lm), text))
    assert f"perplexity {lm.perplexity([text]):,.1f}" in out.getvalue()
    with pytest.raises(InputError, match="at least one word"):
        explain_text(lm, "\n\n")


def test_similar_states_are_adjacent() -> None:
    """Two kinds of states, interleaved by number, each followed by the other kind: the order separates the kinds."""
    kind = torch.tensor([0, 1, 0, 1, 0, 1])
    transition = torch.where(kind[:, None] != kind, 1 / 3 - 1e-3, 1e-3)
    transition = transition / transition.sum(1, keepdim=True)
    hmm = HMM.from_probs(torch.full((6,), 1 / 6), transition, torch.full((6, 2), 0.5))
    order = similar_order(explain_states(LanguageModel(hmm, WordTokenizer(WORDS[:2]))), torch.arange(6))
    assert kind[order].tolist() in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])
