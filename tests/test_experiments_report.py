"""What reports are made of: states explained, comparisons, figures, the page, the demonstration, the recipes."""

import math
import random
import warnings
from io import BytesIO, StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from hmmlm.data.words import WordTokenizer
from hmmlm.errors import InputError
from hmmlm.experiments import plots
from hmmlm.experiments.demo import SENTENCE, demo
from hmmlm.experiments.explain import explain_states, explain_text, similar_order, stationary
from hmmlm.experiments.report import write_report
from hmmlm.experiments.results import Results, gather, typical_sentence, unknown_share
from hmmlm.experiments.tables import path_table, state_followers, states_table
from hmmlm.hmm import HMM
from hmmlm.learning.config import config_from_dict, load_recipe, recipe_names
from hmmlm.learning.progress import Progress
from hmmlm.lm import LanguageModel

WORDS = ["<unk>", "<eos>", "the", "cat", "dog", "runs"]


def sentence_model() -> LanguageModel:
    """Determiner → noun → verb → <eos> → …: every state has its words and its follower; nouns may be unknown."""
    start = [1.0, 0, 0, 0]
    transition = torch.eye(4).roll(1, dims=1)
    emission = [[0, 0, 1, 0, 0, 0], [0.2, 0, 0, 0.5, 0.3, 0], [0, 0, 0, 0, 0, 1.0], [0, 1.0, 0, 0, 0, 0]]
    return LanguageModel(HMM.from_probs(start, transition, torch.tensor(emission)), WordTokenizer(WORDS))


def test_stationary_distribution_is_left_as_it_is() -> None:
    generator = torch.Generator().manual_seed(0)
    hmm = HMM(*((2 * torch.randn(s, generator=generator)).log_softmax(-1) for s in ((7,), (7, 7), (7, 3))))
    start, transition, _ = (log_probs.double().exp() for log_probs in hmm.parameters)
    mass = stationary(start, transition)
    torch.testing.assert_close(mass @ transition, mass, atol=1e-6, rtol=0)
    assert float(mass.sum()) == pytest.approx(1)
    # a cycle, which power iteration on A alone would go round for ever
    torch.testing.assert_close(explain_states(sentence_model()).mass, torch.full((4,), 0.25, dtype=torch.float64))


def test_where_the_chain_restarts_the_start_follows_eos() -> None:
    """State 1 ends a sentence half of the time; the transition out of it leads to state 2, which restarts avoid."""
    hmm = HMM.from_probs([1, 0, 0], [[0, 1, 0], [0, 0, 1], [1, 0, 0]], [[0, 0, 1], [0, 0.5, 0.5], [1, 0, 0.0]])
    config = {"batches": {"kind": "stream", "eval_reset_at_eos": True}}
    states = explain_states(LanguageModel(hmm, WordTokenizer(WORDS[:3]), config))
    torch.testing.assert_close(states.transition[1], torch.tensor([0.5, 0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(states.mass, torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64), atol=1e-6, rtol=0)


def test_telling_words_are_neither_the_frequent_nor_the_rare() -> None:
    """Both states emit `the` most often; `cat` and `dog` tell them apart; `runs` is rarer still."""
    emission = [[0, 0, 0.70, 0.28, 0.0, 0.02], [0, 0, 0.70, 0.0, 0.30, 0.0]]
    hmm = HMM.from_probs([0.5, 0.5], [[0.5, 0.5], [0.5, 0.5]], emission)
    states = explain_states(LanguageModel(hmm, WordTokenizer(WORDS)), words=2)
    assert states.words[0].tolist() == [3, 5]
    assert states.words[1].tolist() == [4, -1]  # nothing else tells of the second state


def test_most_used_states_come_first() -> None:
    hmm = HMM.from_probs([1, 0], [[0.1, 0.9], [0.3, 0.7]], torch.full((2, 2), 0.5))
    states = explain_states(LanguageModel(hmm, WordTokenizer(WORDS[:2])))
    assert states.order.tolist() == [1, 0]
    torch.testing.assert_close(states.mass, torch.tensor([0.25, 0.75], dtype=torch.float64), atol=1e-6, rtol=0)


def test_a_sentence_is_explained_token_by_token() -> None:
    path = explain_text(sentence_model(), "the unicorn runs")
    assert path.tokens == [2, 0, 5, 1]
    assert path.states == [0, 1, 2, 3]
    torch.testing.assert_close(path.posterior, torch.eye(4))
    assert path.log_prob == pytest.approx(math.log(0.2))
    with pytest.raises(InputError, match="at least one word"):
        explain_text(sentence_model(), "")


def test_states_with_alike_neighbours_stand_side_by_side() -> None:
    """Two kinds of states, interleaved by number, each followed by the other kind: the kinds come out apart."""
    kind = torch.tensor([0, 1, 0, 1, 0, 1])
    transition = torch.where(kind[:, None] != kind, 1 / 3 - 1e-3, 1e-3)
    transition = transition / transition.sum(1, keepdim=True)
    hmm = HMM.from_probs(torch.full((6,), 1 / 6), transition, torch.full((6, 2), 0.5))
    order = similar_order(explain_states(LanguageModel(hmm, WordTokenizer(WORDS[:2]))), torch.arange(6))
    assert kind[order].tolist() in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])


def test_tables_show_words_as_they_are() -> None:
    lm = sentence_model()
    lm.tokenizer.words[3] = "[bold]"  # type: ignore[attr-defined]
    out = StringIO()
    console = Console(file=out, width=100)
    states = explain_states(lm, 3)
    console.print(states_table(lm, states, 4), path_table(lm, states, "the dog runs"))
    lines = out.getvalue().splitlines()
    assert any("[bold]" in line and "25.0%" in line for line in lines)
    assert any(line.split()[:3] == ["dog", "1", "1.00"] for line in lines)


def test_figures_of_a_run_that_has_hardly_begun() -> None:
    empty = plots.learning_curve([], [], {"unigram": 300.0})
    assert empty.axes[0].get_ylabel().startswith("perplexity")
    one = plots.learning_curve([(10, 500.0)], [(10, 400.0)], {"unigram": 300.0, "bigram": 100.0})
    low, high = one.axes[0].get_ylim()
    assert low < 100 < 400 < high
    grid = plots.transitions(np.ones((1, 1)), ["0 the"])
    assert [tick.get_text() for tick in grid.axes[0].get_xticklabels()] == ["0 the"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, str]:
    """A tiny run through the demonstration: what it found, and what it said."""
    rng = random.Random(1)
    folder = tmp_path_factory.mktemp("demo")
    nouns = ["function", "list", "module", "<b>tag</b>"]
    lines = [f"The {rng.choice(nouns)} returns the {rng.choice(nouns)} ." for _ in range(300)]
    (folder / "text.txt").write_text("".join(f"{line}\n" for line in lines))
    config = config_from_dict(
        {
            "data": str(folder / "text.txt"),
            "tokenizer": {"split": "whitespace"},
            "model": {"states": 6},
            "batches": {"batch_size": 8, "length": 8, "reset_at_eos": True, "eval_reset_at_eos": True},
            "train": {"epochs": 6, "tensorboard": False, "log_every": 5},
        }
    )
    out = StringIO()
    console = Console(file=out, width=120)
    result = demo(config, folder / "run", Progress(), console)
    assert result.finished
    return gather(folder / "run"), out.getvalue()


def test_the_demonstration_says_everything_it_promises(finished: tuple[Results, str]) -> None:
    results, out = finished
    for promised in ("unigram", "bigram", "HMM, 6 states", "Samples", "most telling words", SENTENCE):
        assert promised in out
    for place in ("report.html", "best", "last", "history.jsonl"):
        assert str(results.run / place) in out
        assert (results.run / place).exists()


def test_results_compare_like_with_like(finished: tuple[Results, str]) -> None:
    results, _ = finished
    test = np.asarray(results.data.tokens["test"].tokens)
    train = np.asarray(results.data.tokens["train"].tokens)
    shares = np.bincount(train, minlength=results.lm.hmm.vocab_size) / len(train)
    assert results.baselines["unigram"]["test"] == pytest.approx(float(np.exp(-np.log(shares[test]).mean())), rel=0.02)
    assert results.baselines["bigram"]["test"] / 2 < results.perplexity["test"] < results.baselines["unigram"]["test"]
    # the model is scored sentence by sentence: so is its perplexity from Python
    text = results.data.tokenizer.decode(test.tolist())
    assert results.perplexity["test"] == pytest.approx(results.lm.perplexity(text.split("\n")[:-1]), rel=1e-3)
    assert results.perplexity["test"] == pytest.approx(results.lm.perplexity([text]), rel=1e-3)


def test_the_page_is_whole_and_escapes_what_the_text_says(finished: tuple[Results, str]) -> None:
    results, _ = finished
    report = write_report(results).read_text()
    assert report.count("data:image/png;base64,") == 4
    assert "<b>tag</b>" not in report
    assert "&lt;b&gt;tag&lt;/b&gt;" in report
    assert f"{results.perplexity['test']:,.1f}" in report
    assert "optimizer.baum_welch.pseudocount" in report  # every setting
    assert "http" not in report


def test_a_model_too_large_to_explain_still_has_a_report(
    finished: tuple[Results, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results, _ = finished
    for module in ("explain", "report"):
        monkeypatch.setattr(f"hmmlm.experiments.{module}.LARGEST", 5)
    report = write_report(results).read_text()
    assert report.count("data:image/png;base64,") == 2
    assert "What the states stand for" not in report
    with pytest.raises(InputError, match="6 states are too many"):
        explain_states(results.lm)


def test_a_typical_sentence_is_one_of_the_test_text(finished: tuple[Results, str]) -> None:
    results, _ = finished
    sentence = typical_sentence(results.data)
    assert sentence.startswith("The ")
    assert sentence.endswith(" .")


def test_share_of_unknown_words_does_not_count_eos(finished: tuple[Results, str]) -> None:
    from hmmlm.data.tokenfile import TokenFile

    tokens = TokenFile.from_arrays([0, 2, 1, 0, 3, 3, 1], None, 4)
    assert unknown_share(tokens, unk=0, eos=1) == pytest.approx(2 / 5)
    assert unknown_share(tokens, unk=None, eos=1) == 0


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid_and_says_why(name: str) -> None:
    config = load_recipe(name)
    assert config.model.states > 0
    text = (Path(plots.__file__).parent / "recipes" / f"{name}.toml").read_text()
    assert text.startswith("# ")


def test_the_recipes_the_commands_rely_on_are_there() -> None:
    assert {"default", "demo"} <= set(recipe_names())


def test_stationary_distribution_of_a_chain_that_hardly_moves_and_of_one_that_is_torn() -> None:
    slow = torch.tensor([[1 - 1e-7, 1e-7], [3e-7, 1 - 3e-7]], dtype=torch.float64)
    start = torch.tensor([0.0, 1.0], dtype=torch.float64)
    want = torch.tensor([0.75, 0.25], dtype=torch.float64)
    torch.testing.assert_close(stationary(start, slow), want, atol=1e-6, rtol=0)
    excess = (slow * (1 + 1e-7)).float()  # rows sum to one only as far as float32 goes
    assert float(stationary(start.float(), excess).sum()) == pytest.approx(1)
    # two parts that never meet: the start decides
    torn = torch.block_diag(torch.eye(2).roll(1, 0), torch.full((2, 2), 0.5)).double()
    mass = stationary(torch.tensor([0.6, 0, 0.4, 0], dtype=torch.float64), torn)
    torch.testing.assert_close(mass, torch.tensor([0.3, 0.3, 0.2, 0.2], dtype=torch.float64))


@pytest.mark.parametrize("restarts", [False, True])
def test_lines_are_explained_as_perplexity_reads_them(restarts: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logs = ((2 * torch.randn(s, generator=generator)).double().log_softmax(-1) for s in ((3,), (3, 3), (3, 6)))
    config = {"batches": {"kind": "stream", "eval_reset_at_eos": restarts}}
    lm = LanguageModel(HMM(*logs), WordTokenizer(WORDS), config)
    text = "the cat runs\nthe dog\ncat"
    path = explain_text(lm, text)
    assert path.tokens == lm.encode(text)
    assert math.exp(-path.log_prob / len(path.tokens)) == pytest.approx(lm.perplexity([text]))
    parts = [explain_text(lm, line) for line in text.split("\n")]
    apart = torch.cat([part.posterior for part in parts])
    assert torch.allclose(path.posterior, apart) == restarts
    if restarts:
        assert path.states == [state for part in parts for state in part.states]
    out = StringIO()
    Console(file=out, width=100).print(path_table(lm, explain_states(lm), text))
    assert f"perplexity {lm.perplexity([text]):,.1f}" in out.getvalue()
    with pytest.raises(InputError, match="at least one word"):
        explain_text(lm, "\n\n")


def test_what_is_not_certain_is_not_shown_as_100_percent() -> None:
    hmm = HMM.from_probs([1, 0], [[0.007, 0.993], [0.0, 1.0]], torch.full((2, 2), 0.5))
    states = explain_states(LanguageModel(hmm, WordTokenizer(WORDS[:2])))
    assert state_followers(states, 0, WordTokenizer(WORDS[:2]), 1).endswith(" 99.3%")
    assert "100" in state_followers(states, 1, WordTokenizer(WORDS[:2]), 1)


@pytest.mark.parametrize("value", [1.3e54, 1e304, float("inf")])
def test_perplexities_beyond_reason_can_be_drawn(value: float) -> None:
    valid = [(1000.0, min(value, 1e304)), (2000.0, 300.0)]
    figure = plots.learning_curve(valid, valid, {"unigram": 500.0, "bigram": value})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as a layout that cannot be had
        figure.savefig(BytesIO(), format="png")
    axes = figure.axes[0]
    shown = [text.get_text() for text in (*axes.texts, *axes.get_yticklabels())]
    assert shown and max(map(len, shown)) < 20
