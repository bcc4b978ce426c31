"""Running studies: records of runs that succeed, fail and are interrupted; resuming; the command line."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hmmlm.cli.main import main
from hmmlm.errors import InputError
from hmmlm.learning.losses import Losses
from hmmlm.report.results import evaluate_run
from papers import __main__ as command_line
from papers import runner
from papers.catalogue import STUDIES
from papers.records import add_record
from papers.runner import SPEEDS, perform
from papers.study import BASELINE, NGRAM, UNSPENT, Combination, Study, StudyRow, StudyRun


def tiny(**settings: object) -> StudyRun:
    """Return a blocked model small enough for a test, on the corpus that every Python carries."""
    named = {
        "data": "embedded",
        "tokenizer.vocab_size": 1500,
        "tokenizer.split": "words",
        "model.num_states": 128,
        "model.blocks": 16,
        "model.hidden": 32,
        "train.precision": "32-true",
        "train.device": "cpu",
        "optimizer.lr": 0.02,
        "train.max_tokens": 40_000,
        "train.log_every": 5,
        **{name.replace("__", "."): value for name, value in settings.items()},
    }
    return StudyRun(StudyRow(name="embedded, blocked", recipe="ptb-vl-hmm", settings=named, seeds=(0,)), 0)


@pytest.mark.slow
def test_a_blocked_model_learns_on_the_embedded_corpus(tmp_path: Path) -> None:
    record = perform(tiny(), tmp_path)
    metrics = record["metrics"]
    run = next(tmp_path.iterdir())
    unigram = evaluate_run(run).baselines["unigram"]["valid"].perplexity
    assert metrics["valid_perplexity"] < 0.75 * unigram  # untrained networks are far above it
    assert metrics["tokens"] >= 40_000 and metrics["step_ms"] > 0
    assert record["command"].startswith("hmmlm train --recipe ptb-vl-hmm --data embedded")
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert all(math.isfinite(event["loss"]) for event in history if event["event"] != "start")
    assert {path.name for path in run.iterdir() if path.is_symlink()} == {"best", "final"}
    assert not list(run.rglob("state.*")) and list((run / "best").iterdir())  # the model stays


@pytest.mark.slow
def test_the_teacher_of_a_row_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "data": "embedded",
        "tokenizer.vocab_size": 1500,
        "tokenizer.split": "words",
        "model.kind": "feedforward",
        "model.hidden": 16,
        "train.device": "cpu",
        "train.max_tokens": 10_000,
    }
    teacher = StudyRow(name="a teacher", recipe=BASELINE, settings=settings, seeds=(3,))
    run = tiny(train__max_tokens=5_000, next_words__weight=0.25)
    run = StudyRun(replace(run.row, teacher=teacher), run.seed)
    record = perform(run, tmp_path)
    assert record["command"].startswith("hmmlm baseline --model.kind feedforward ")
    assert " --train.seed 3 --out runs/teacher && hmmlm train --recipe ptb-vl-hmm" in record["command"]
    assert " --next-words.teacher runs/teacher " in record["command"]
    assert record["command"].endswith(" --next-words.weight 0.25 --train.seed 0")
    folder = tmp_path / "teacher-a-teacher-3"
    student = next(path for path in tmp_path.iterdir() if path != folder)
    assert json.loads((student / "config.json").read_text())["next_words"]["teacher"] == str(folder)
    monkeypatch.setattr("hmmlm.learning.train.train_baseline", None)  # it would fail
    assert runner.train_teacher_of(run, tmp_path) == folder
    as_row = folder.rename(tmp_path / "a-teacher-3-1-1")  # the run of a row of its own
    assert runner.train_teacher_of(run, tmp_path) == as_row


@pytest.mark.slow
def test_a_baseline_is_performed_like_any_run(tmp_path: Path) -> None:
    settings = {
        "data": "embedded",
        "tokenizer.vocab_size": 1500,
        "model.kind": "feedforward",
        "model.hidden": 16,
        "optimizer.lr": 0.01,
        "train.device": "cpu",
        "train.max_tokens": 40_000,
        "optimizer.betas": [0.8, 0.99],
    }
    row = StudyRow(name="embedded, FF 5-gram", recipe=BASELINE, settings=settings)
    record = perform(StudyRun(row, 1), tmp_path, alone=False)
    assert " --optimizer.betas '[0.8,0.99]' " in record["command"]
    saved = json.loads((next(tmp_path.iterdir()) / "config.json").read_text())
    assert saved["optimizer"]["betas"] == [0.8, 0.99]
    metrics = record["metrics"]
    assert metrics["tokens"] >= 40_000 and 0 < metrics["epochs"] < 1 and metrics["best_step"] > 0
    assert not set(SPEEDS) & set(metrics)  # others may have been on the machine
    assert not list(tmp_path.rglob("state.*")) and list(tmp_path.glob("*/best/*"))
    assert 1 < metrics["valid_perplexity"] < 250 and 1 < metrics["train_perplexity"] < 700  # half of the 500 words
    assert record["command"].startswith("hmmlm baseline --model.kind feedforward --tokenizer.vocab-size 1500")


@pytest.mark.slow
@pytest.mark.parametrize("mixed", ["sequence", "token"])
def test_a_combination_trains_its_parts_once(mixed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = list[Path]()
    train = runner._train

    def counted(config: Any, folder: Path, on_gpu: bool) -> dict[str, Any]:
        trained.append(folder)
        return train(config, folder, on_gpu)

    monkeypatch.setattr(runner, "_train", counted)
    parts = tuple(
        replace(tiny(train__max_tokens=8_000, model__blocks=blocks).row, name=f"{blocks} blocks") for blocks in (8, 16)
    )
    counts = {} if mixed == "sequence" else {"ngram": 3, "cache": 100, "recent": 50}
    both = Combination(parts=parts, mixed=mixed, **counts)
    row = StudyRow(name="both", recipe=parts[0].recipe, seeds=(0,), combine=both)
    alone = [perform(StudyRun(part, 0), tmp_path)["metrics"]["valid_perplexity"] for part in parts[:1]]
    record = perform(StudyRun(row, 0), tmp_path)
    assert len(trained) == 2  # the first part existed
    metrics = record["metrics"]
    assert metrics["valid_perplexity"] <= alone[0] + 0.1 and metrics["test_perplexity"] > 1
    assert sum(metrics[f"weight_{i}"] for i in range(1, 3 + len(counts))) == pytest.approx(1, abs=1e-3)
    assert record["command"].endswith("hmmlm eval combined --data parts/1 --splits valid,test")
    again = perform(StudyRun(row, 0), tmp_path)
    assert len(trained) == 2 and again["metrics"]["test_perplexity"] == metrics["test_perplexity"]


@pytest.mark.slow
def test_a_run_that_fails_to_train_has_a_record_with_the_reason(tmp_path: Path) -> None:
    record = perform(tiny(optimizer__lr=1000, optimizer__max_grad_norm=0, schedule__kind="constant"), tmp_path / "work")
    assert record["metrics"] == {} and record["commit"]
    assert "the training loss is nan" in record["stopped"] and str(tmp_path) not in record["stopped"]


@pytest.mark.slow
def test_an_interrupted_run_has_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, sent = Losses.read, list[signal.Signals]()

    def interrupted(self: Losses, step: int) -> list[float]:
        if not sent:  # a second signal would end the process
            sent.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return read(self, step)

    monkeypatch.setattr(Losses, "read", interrupted)
    with pytest.raises(InputError, match="interrupted: the run has no record"):
        perform(tiny(train__log_every=1), tmp_path)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs a study of two seeds, without training, from the command line."""

    def recorded(run: StudyRun, work: Path, alone: bool) -> dict[str, Any]:
        if run.seed == 3:
            raise RuntimeError("broken")
        settings = dict(run.row.settings)
        made = {"row": run.row.name, "recipe": run.row.recipe, "seed": run.seed, "settings": settings}
        return {**made, "metrics": {"alone": alone}}

    monkeypatch.setattr(runner, "perform", recorded)
    monkeypatch.setattr(runner, "ProcessPoolExecutor", lambda jobs, mp_context: ThreadPoolExecutor(jobs))
    row = StudyRow(name="embedded, blocked", recipe="ptb-vl-hmm", settings=tiny().row.settings, seeds=(1, 2))
    broken = StudyRow(name="broken", recipe="ptb-vl-hmm", seeds=(3,))
    monkeypatch.setitem(STUDIES, "tiny", Study(name="tiny", title="Tiny", rows=(row, broken)))
    return lambda *words: command_line.main(["tiny", "--out", str(tmp_path), *words])


def test_a_study_resumes(study: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def runs(*words: str) -> dict[int, bool]:
        """Return the records after a run of the study, in their order: seed and whether it was alone."""
        assert study("--rows", "blocked", "--set", "model.hidden=16", *words) == 0
        records = json.loads((tmp_path / "tiny.json").read_text())
        return {record["seed"]: record["metrics"]["alone"] for record in records}

    assert runs("--seeds", "2") == {2: True}
    assert list(runs("--jobs", "2").items()) == [(2, True), (1, False)]
    assert "1 of 2 runs to train; the others have a record" in capsys.readouterr().out
    assert list(runs("--again", "--seeds", "2", "--jobs", "2").items()) == [(1, False), (2, False)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_study_starts_no_further_run(
    number: signal.Signals,
    study: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[int] = []

    def stopped(run: StudyRun, work: Path, alone: bool) -> dict[str, Any]:
        started.append(run.seed)
        os.kill(os.getpid(), number)
        raise InputError("interrupted")

    monkeypatch.setattr(runner, "perform", stopped)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process may ignore it
    try:
        assert study() == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert started == [1]
    assert "the same command trains the others" in capsys.readouterr().err


def test_a_crashed_run_does_not_lose_the_others(
    study: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study() == 1
    assert "FAILED broken: RuntimeError('broken')" in capsys.readouterr().out
    assert [record["seed"] for record in json.loads((tmp_path / "tiny.json").read_text())] == [1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "huge"], "no run of tiny has 'huge' in its row name and a seed of [1, 2, 3]; seeds: [1, 2, 3]; "),
        (["--seeds", "4"], "and a seed of [4]; seeds: [1, 2, 3]; rows: embedded, blocked; broken"),
        (
            ["--set", "model.state=3"],
            "unknown setting model.state for model.kind = 'neural'; did you mean model.num_sta",
        ),
        (["--set", "modle.states=3"], "unknown setting modle; did you mean model?"),
        (["--set", "train=3"], "train is a section and cannot be set to '3'"),
        (["--set", "states"], "--set states: write it as name=value"),
        (["--jobs", "0"], "--jobs must be at least 1, not 0"),
        (["--job"], "expected one argument"),
        (["--color"], "unrecognized arguments: --color"),
    ],
)
def test_mistakes_are_one_line(
    study: Callable[..., int], words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("papers: error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "tiny.json").exists()


def test_studies_are_named_or_made_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["chiu2020-tabel1"]) == 2
    assert "no study named 'chiu2020-tabel1'; nearest: chiu2020-table1" in capsys.readouterr().err
    assert (
        command_line.main([]) == 2
        and "name a study, show and a study, publish, --list or --check" in capsys.readouterr().err
    )
    assert command_line.main(["steering"]) == 2
    assert "it is made by: python -m benchmarks.steering" in capsys.readouterr().err
    assert command_line.main(["publish", "--rows", "x"]) == 2
    assert "publish takes no options" in capsys.readouterr().err


@pytest.mark.slow
def test_list_shows_every_study_and_what_it_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert command_line.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = {first.partition(": ")[0]: second.strip() for first, second in pairwise(lines)}
    assert set(STUDIES) <= set(facts)
    assert facts["chiu2020-table1"].startswith("17 rows; seeds 0, 1; data ptb, wikitext-2; GPU; up to ")
    assert "; needs tokenizer.model, teachers/stories15M; CPU" in facts["lee2025-table4-cpu"]
    assert "GB" in facts["lee2025-figure3"] and "minutes per run" in facts["chiu2020-cpu"]
    assert facts["steering"] == "5 rows; made by python -m benchmarks.steering; CPU"


def test_records_replace_those_of_the_same_run_and_keep_others(tmp_path: Path) -> None:
    file = tmp_path / "study.json"
    record = {"row": "a", "seed": 0, "settings": {}, "metrics": {"valid_perplexity": 3.0}}
    for changed in (record, {**record, "seed": 1}, {**record, "metrics": {"valid_perplexity": 2.0}}):
        add_record(file, changed)
    kept = {(r["row"], r["seed"]): r["metrics"]["valid_perplexity"] for r in json.loads(file.read_text())}
    assert kept == {("a", 0): 2.0, ("a", 1): 3.0}


@pytest.mark.slow
def test_a_list_that_nobody_reads_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    root = Path(__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-m", "papers", "--list"], cwd=root, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lee2025-table1", "--rows", "huge"], "no run of lee2025-table1 has 'huge' in its row name"),
        (["lee2025-tabel1"], "no study named 'lee2025-tabel1'"),
        (
            ["lee2025-figure3", "--rows", "stories15M"],
            "the row 'stories15M' needs transformers, which the extra hmmlm[teacher] installs: pip install 'hmmlm",
        ),
    ],
)
def test_mistakes_are_told_without_torch(words: list[str], message: str) -> None:
    program = f"""
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "transformers" else find_spec(name, *more)
from papers.__main__ import main
assert main({words!r}) == 2
assert "torch" not in sys.modules
"""
    root = Path(__file__).parents[1]
    result = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0 and message in result.stderr, result.stderr


def test_the_folder_of_corpora_is_no_setting_of_a_record(
    study: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HMMLM_DATA", raising=False)
    assert study("--rows", "blocked", "--data-folder", str(tmp_path / "corpora")) == 0
    assert os.environ["HMMLM_DATA"] == str(tmp_path / "corpora")
    assert "corpora" not in (tmp_path / "tiny.json").read_text()
    monkeypatch.setenv("HMMLM_DATA", "")  # undone at the end, whatever the command line set


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [True, False])
def test_an_ngram_is_a_row_like_any_other(
    restarts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"data": "embedded", "order": 3, "reset_at_eos": restarts}
    record = perform(StudyRun(StudyRow(name="KN 3-gram", recipe=NGRAM, settings=settings, seeds=(0,)), 0), tmp_path)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    for line in record["command"].split(" && "):
        assert main([*shlex.split(line)[1:], *(["--json"] if "ngram" in line else ["--quiet"])]) == 0
    printed = capsys.readouterr().out
    results = json.loads(printed[printed.index("{") :])["results"]
    for split in ("valid", "test"):
        assert record["metrics"][f"{split}_perplexity"] == pytest.approx(results[split]["perplexity"], abs=1e-3)
    assert ("--reset-at-eos" in record["command"]) == restarts


def test_a_row_shows_its_command_and_what_was_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> list[str]:
        assert command_line.main(["show", *words]) == 0
        return capsys.readouterr().out.splitlines()

    title, name, line = shown("chiu2020-table1", "--rows", "PTB, VL-HMM")
    assert title.startswith("chiu2020-table1: ") and name == "# PTB, VL-HMM 2^15: seeds 0, 1"
    assert line == "hmmlm train --recipe ptb-vl-hmm --train.seed 0"
    assert "# WikiText-2, VL-HMM 2^15: not run: " + UNSPENT in shown("chiu2020-table1-released")
    assert any(line.endswith("recorded with a method that 616d6b9 removed") for line in shown("lee2025-apart"))
    assert shown("speed")[1:] == ["python -m benchmarks.speed"]
