"""The report of a run: results, the HTML page and the demonstration."""

import random
import re
import shlex
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import ParsedError, only_parse
from helpers.report_models import sentence_model
from markupsafe import escape
from rich.console import Console

from hmmlm.cli.main import main
from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.data.tokenfile import TokenFile, unknown_fraction
from hmmlm.errors import InputError
from hmmlm.lm import embeddings
from hmmlm.lm.scoring import TextScore
from hmmlm.report.demo import BLANK, SENTENCE, _verdict, next_steps, run_demo
from hmmlm.report.explain import explain_states
from hmmlm.report.facts import training_facts
from hmmlm.report.page import next_commands, write_report
from hmmlm.report.results import RunResults, evaluate_run, typical_sentence
from hmmlm.runs.folders import flat_settings
from hmmlm.runs.progress import Progress
from hmmlm.training.prepare import Prepared

NOUNS = ["function", "list", "<b>tag</b>", "<script>alert(1)</script>", "$x^$", "{{1+1}}"]
"""Words that HTML, mathtext or a template would read as their own."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResults, str]:
    """A tiny run through the demonstration: its results and its output."""
    rng = random.Random(1)
    folder = tmp_path_factory.mktemp("demo")
    lines = [f"The {rng.choice(NOUNS)} returns the {rng.choice(NOUNS)} ." for _ in range(300)]
    (folder / "text.txt").write_text("".join(f"{line}\n" for line in lines))
    config = read_config(
        RunConfig,
        {
            "data": str(folder / "text.txt"),
            "tokenizer": {"split": "whitespace"},
            "model": {"num_states": 6},
            "batches": {"batch_size": 8, "length": 8, "reset_at_eos": True, "eval_reset_at_eos": True},
            "optimizer": {"lr": 0.1, "eps": 1e-8},
            "train": {"epochs": 6, "tensorboard": False, "log_every": 5},
        },
    )
    out = StringIO()
    result = run_demo(config, folder / "run", Progress(), Console(file=out, width=120))
    assert result.finished
    return evaluate_run(folder / "run"), out.getvalue()


@pytest.fixture(scope="module")
def page(finished: tuple[RunResults, str]) -> str:
    return write_report(finished[0]).read_text()


def test_the_demonstration_prints_results_states_and_files(finished: tuple[RunResults, str]) -> None:
    results, out = finished
    for text in ("unigram", "bigram", "HMM, 6 states", "Samples", "most telling words", SENTENCE):
        assert text in out
    for file in ("report.html", "best", "last", "history.jsonl"):
        assert str(results.run / file) in out
        assert (results.run / file).exists()
    steps = next_steps(results.run)
    assert len(steps) == 3 and out.index("to try next") < min(map(out.index, steps))
    for command, purpose in steps.items():
        assert command in out and purpose in out


def test_the_demonstration_ends_with_commands_that_work(
    finished: tuple[RunResults, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("a line\n" * 3)
    only_parse(monkeypatch)
    for command in next_steps(finished[0].run):
        with pytest.raises(ParsedError):
            main(shlex.split(command)[1:])


def test_the_demonstration_leads_with_the_mixture(finished: tuple[RunResults, str]) -> None:
    results, out = finished
    assert "HMM + 5-gram, the average of their probabilities" in " ".join(out.split())
    better, worse = (TextScore(10, log_likelihood, 8, 0, 0.0) for log_likelihood in (-9.0, -11.0))
    for hmm, ngram, text, share in ((better, worse, "ahead of", "26%"), (worse, better, "behind", "10%")):
        baselines = results.baselines | {"5-gram": {"test": ngram}}
        mixture = {"test": TextScore(10, -8.0, 8, 0, 0.0)}
        compared = replace(results, scores={"test": hmm}, baselines=baselines, mixture=mixture)
        assert next(iter(compared.best_first())) == ("model" if hmm is better else "HMM + 5-gram")
        verdict = _verdict(compared)
        assert f"is {share} below the 5-gram" in verdict and verdict.endswith(f"the HMM is {text} the 5-gram.")


def test_the_demonstration_answers_what_only_an_hmm_can(finished: tuple[RunResults, str]) -> None:
    results, out = finished
    word, p = results.lm.infill(BLANK, 1, allow_unk=False)[0][0]
    assert f"{word} {p:.0%}" in out
    texts = [line for line in out.split("Texts that must contain")[1].splitlines() if line.startswith("• ")]
    assert len(texts) == 4 and all("function" in text.split() and "list" in text.split() for text in texts)


def test_results_compare_like_with_like(finished: tuple[RunResults, str]) -> None:
    results, _ = finished
    test = np.asarray(results.data.tokens["test"].tokens)
    train = np.asarray(results.data.tokens["train"].tokens)
    shares = np.bincount(train, minlength=results.lm.hmm.vocab_size) / len(train)
    unigram = results.baselines["unigram"]["test"].perplexity
    assert unigram == pytest.approx(float(np.exp(-np.log(shares[test]).mean())), rel=0.02)
    perplexities = {name: scores["test"].perplexity for name, scores in results.baselines.items()}
    assert perplexities["bigram"] / 2 < results.scores["test"].perplexity < perplexities["unigram"]
    # the model is scored sentence by sentence: so is its perplexity from Python
    text = results.data.tokenizer.decode(test.tolist())
    assert results.scores["test"].perplexity == pytest.approx(results.lm.perplexity(text.split("\n")[:-1]), rel=1e-3)
    assert results.scores["test"].perplexity == pytest.approx(results.lm.perplexity([text]), rel=1e-3)


def test_the_page_is_complete_and_self_contained(finished: tuple[RunResults, str], page: str) -> None:
    results, _ = finished
    assert page.count("data:image/png;base64,") == 4
    assert f"{results.scores['test'].perplexity:,.1f}" in page
    assert all(f"<td>{name}</td>" in page for name in flat_settings(results.config.dump()))  # every setting
    assert "http" not in page
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    for command in next_commands(results):
        assert escape(command) in page
    for text in ("training speed", "tokens/s", "training time", "Kneser-Ney 5-gram", "unknown words", "Samples"):
        assert text in page


def test_words_are_escaped(page: str) -> None:
    assert "<script" not in page
    assert "<b>tag</b>" not in page
    assert "&lt;b&gt;tag&lt;/b&gt;" in page
    assert "&lt;script&gt;" in page
    assert "{{1+1}}" in page


def test_the_page_has_a_dark_mode_with_plots_on_white(page: str) -> None:
    style = page[page.index("<style>") : page.index("</style>")]
    assert "@media (prefers-color-scheme: dark)" in style
    assert "color-scheme: light dark" in style
    assert re.search(r"\.plot \{[^}]*background: #fff", style)


def test_settings_that_differ_from_the_defaults_come_first(finished: tuple[RunResults, str], page: str) -> None:
    """`epochs` and `log_every` are set in the run's configuration; `seed` is not."""
    shown, _, folded = page[page.index("Settings</h2>") :].partition("<details>")
    names = {part: re.findall(r"<tr><td>([\w.]+)</td>", text) for part, text in (("shown", shown), ("folded", folded))}
    assert {"data", "tokenizer.split", "model.num_states", "train.epochs", "train.log_every"} <= set(names["shown"])
    assert {"train.seed", "optimizer.betas", "optimizer.weight_decay", "model.kind"} <= set(names["folded"])
    assert not set(names["shown"]) & set(names["folded"])
    assert "<tr><td>model.num_states</td><td>6</td></tr>" in shown


def test_settings_of_sections_within_sections_are_compared_with_their_defaults(
    finished: tuple[RunResults, str],
) -> None:
    lvd = {"kind": "lvd", "teacher": "teachers/mine", "kmeans": {"tokens": 600}}
    config = read_config(RunConfig, {"initialization": lvd, "model": {"kind": "linear"}})
    text = write_report(replace(finished[0], config=config)).read_text()
    shown = text[text.index("Settings</h2>") :].partition("<details>")[0]
    assert set(re.findall(r"<tr><td>([\w.]+)</td>", shown)) == {
        "tokenizer.kind",
        "model.kind",
        "initialization.kind",
        "initialization.teacher",
        "initialization.kmeans.tokens",
    }


def test_facts_are_those_that_the_history_has() -> None:
    train = {"event": "train", "tokens": 500, "seconds": 3725.0}
    history = [
        {"event": "start", "device": "cuda", "parameters": 1234567},
        {**train, "tokens_per_second": 10, "seconds": 1.0},
        {**train, "tokens_per_second": 90},
        {**train, "tokens_per_second": 110},
        {"event": "valid", "tokens": 500, "seconds": 3725.0},
    ]
    assert training_facts(history) == {
        "device": "cuda",
        "parameters": "1,234,567",
        "training speed": "100 tokens/s",  # without the first record, which includes the warm-up
        "training time": "1 h 2 min",
        "training tokens": "500",
        "validation checks": "1",
    }
    assert training_facts([]) == {"validation checks": "0"}


def test_commands_quote_the_folder_of_the_run(finished: tuple[RunResults, str]) -> None:
    results, _ = finished
    commands = next_commands(replace(results, run=results.run / "my run"))
    assert all(f"'{results.run / 'my run'}'" in command for command in commands)


def test_commands_can_be_typed_where_the_program_is_not_on_the_path(
    finished: tuple[RunResults, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "hmmlm").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(folder / "hmmlm"), "demo"])
    for path, name in (("/nowhere", ".venv/bin/hmmlm"), (str(folder), "hmmlm")):
        monkeypatch.setenv("PATH", path)
        assert all(command.startswith(f"{name} ") for command in next_commands(finished[0]))


def test_a_model_too_large_to_explain_still_has_a_report(
    finished: tuple[RunResults, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results, _ = finished
    monkeypatch.setattr(embeddings, "MAX_STATES", 5)
    report = write_report(results).read_text()
    assert report.count("data:image/png;base64,") == 2
    assert "most telling words" not in report
    assert "hmmlm inspect" not in report
    with pytest.raises(InputError, match="6 states are too many"):
        explain_states(results.lm)


def test_a_report_is_written_despite_a_sentence_of_probability_zero(finished: tuple[RunResults, str]) -> None:
    results, _ = finished
    report = write_report(replace(results, lm=sentence_model()), "runs runs").read_text()
    assert report.count("data:image/png;base64,") == 3
    assert "“runs runs” cannot be shown: sequence 0 is impossible under this model" in report


def test_a_typical_sentence_is_a_line_of_the_test_split(finished: tuple[RunResults, str]) -> None:
    results, _ = finished
    sentence = typical_sentence(results.data)
    assert sentence.startswith("The ")
    assert sentence.endswith(" .")


def test_a_typical_sentence_is_short_even_where_lines_are_long() -> None:
    tokenizer = sentence_model().tokenizer
    tokens = TokenFile.from_arrays([2, 3, 5] * 5_000 + [1], None, 6)
    sentence = typical_sentence(Prepared(tokenizer, {"test": tokens}))
    assert sentence.split() == ["the", "cat", "runs"] * 5


def test_fraction_of_unknown_words_does_not_count_eos() -> None:
    tokens = TokenFile.from_arrays([0, 2, 1, 0, 3, 3, 1], None, 4)
    assert unknown_fraction(tokens, unk=0, eos=1) == pytest.approx(2 / 5)
    assert unknown_fraction(tokens, unk=None, eos=1) == 0
