"""Log-probabilities of single tokens, and the figures of a text."""

import math

import pytest
import torch
from helpers.blocked_scan import two_regimes
from helpers.oracle import random_blocked_hmm, random_hmm
from helpers.report_models import sentence_model

from hmmlm.data.tokenfile import TokenFile
from hmmlm.data.words import WordTokenizer
from hmmlm.emissions import Blocked
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel
from hmmlm.lm.scoring import TextScore
from hmmlm.ops import pieces
from hmmlm.report.results import score_tokens
from hmmlm.transitions import Factored


@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_log_probabilities_of_tokens_are_differences_of_likelihoods(kind: str) -> None:
    hmm = random_blocked_hmm(3, 4, 9, seed=1)
    if kind == "dense":
        hmm = HMM.from_probs(*random_hmm(5, 9, seed=1))
    hmm = hmm.to(torch.float64)
    tokens, lengths = torch.tensor([[3, 1, -1, 8, 0], [2, 2, 5, -1, -1]]), torch.tensor([5, 3])
    found = hmm.token_log_probs(tokens, lengths)
    for row, length, log_probs in zip(tokens, lengths.tolist(), found, strict=True):
        prefixes = torch.stack([hmm.log_likelihood(row[None, :t])[0] for t in range(1, length + 1)])
        torch.testing.assert_close(log_probs[:length].cumsum(0), prefixes)
        assert not log_probs[length:].any()
    carry = hmm.filter(tokens[:, :2]).carry
    torch.testing.assert_close(hmm.token_log_probs(tokens[:, 2:], lengths - 2, carry), found[:, 2:])


def test_an_impossible_text_has_infinite_perplexity_in_windows_too() -> None:
    lm = sentence_model()
    impossible = lm.encode("runs runs the the cat the the cat")
    whole = lm.token_log_probs([impossible])[0]
    assert float(whole.sum()) == -math.inf
    with pieces.limit(2 * lm.hmm.num_states):
        assert float(lm.token_log_probs([impossible])[0].sum()) == -math.inf
    for config in ({}, {"batches": {"kind": "stream", "eval_reset_at_eos": True}}):
        other = LanguageModel(lm.hmm, lm.tokenizer, config)
        text = TokenFile.from_arrays([*impossible, lm.tokenizer.unk_id, lm.tokenizer.eos_id], None, lm.hmm.vocab_size)
        with pieces.limit(2 * lm.hmm.num_states):
            score = score_tokens(other, text)
        assert score.perplexity == score.known_perplexity == math.inf
        assert score.figures()["perplexity"] is None and score.figures()["bits_per_byte"] is None


@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_a_state_that_matters_in_a_later_window_is_not_lost(kind: str) -> None:
    """Two states that hardly ever change; after the first window, the state of the later words is below any float32."""
    block_of_word, u, w, log_normalizer, log_start, log_emission = two_regimes(-1e4, -25.0)
    hmm = HMM(log_start, Factored(u, w, log_normalizer), Blocked(log_emission, block_of_word)).to(torch.float32)
    hmm = hmm.dense() if kind == "dense" else hmm
    lm = LanguageModel(hmm, WordTokenizer(["<unk>", "<eos>"]))
    tokens = TokenFile.from_arrays([0] * 8 + [1] * 30, None, 2)
    with pieces.limit(8 * hmm.num_states):
        assert score_tokens(lm, tokens).log_likelihood == pytest.approx(math.log(0.5) - 8 * 25, rel=1e-6)
        assert float(hmm.log_likelihood([tokens.tokens.tolist()])) == pytest.approx(math.log(0.5) - 8 * 25, rel=1e-6)


@pytest.mark.parametrize("device", ["mps", torch.device("mps"), torch.device("mps:0")])
def test_a_device_without_float64_is_refused(device: str | torch.device) -> None:
    with pytest.raises(InputError, match=r"device 'mps' has no float64.*use 'auto' or 'cpu'"):
        sentence_model().to(device)


def test_figures() -> None:
    score = TextScore(
        10, -10 * math.log(4), words=8, unknown_words=2, unknown_log_likelihood=-math.log(4), text_bytes=40
    )
    assert score.perplexity == pytest.approx(4) and score.bits_per_token == pytest.approx(2)
    assert score.known_perplexity == pytest.approx(4 ** (9 / 8))
    assert score.bits_per_byte == pytest.approx(0.5) and score.unknown_share == 0.25
    only_unknown = TextScore(1, -1.0, words=1, unknown_words=1, unknown_log_likelihood=-1.0)
    assert math.isnan(only_unknown.known_perplexity)
    assert only_unknown.figures()["perplexity_without_unknown"] is None


def line_model() -> LanguageModel:
    """Return a random model in single precision that restarts at every line."""
    tokenizer = sentence_model().tokenizer
    hmm = HMM.from_probs(*random_hmm(3, tokenizer.vocab_size, seed=0)).to(torch.float32)
    return LanguageModel(hmm, tokenizer, {"batches": {"kind": "stream", "eval_reset_at_eos": True}})


def test_an_empty_text_after_a_line_is_an_empty_line() -> None:
    lm = line_model()
    for given in ("the cat\n", "the cat\n\n"):
        assert lm.score([""], given=given).tolist() == pytest.approx(lm.score([""]).tolist())


def test_a_text_of_many_lines_is_summed_in_double_precision() -> None:
    lm = line_model()
    one = lm.score(["the cat runs"]).double()
    assert lm.score(["the cat runs\n" * 30_000]).double().item() == pytest.approx(30_000 * one.item(), rel=2e-7)


def test_a_temperature_close_to_zero_takes_the_most_likely_token() -> None:
    lm = sentence_model()
    texts = [lm.generate("the", max_new_tokens=3, temperature=t, seed=0) for t in (0, 1e-320)]
    assert texts[0] == texts[1]


def test_decode_leaves_out_the_ends_that_fill_a_row() -> None:
    lm = line_model()
    line = lm.encode("the cat runs")
    eos = lm.tokenizer.eos_id
    assert lm.decode(line) == lm.decode([*line, *[eos] * 15]) == "the cat runs"
    assert lm.decode([*line, *line, eos]) == "the cat runs\nthe cat runs"
    assert lm.decode([eos] * 3) == lm.decode([]) == ""
