"""Studies: every run is a valid configuration with a command that gives the same one; records and their tables."""

import json
import math
import os
import shlex
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hmmlm.cli import baseline
from hmmlm.cli.parse import parse
from hmmlm.cli.train import _parse
from hmmlm.errors import InputError
from hmmlm.experiments import studies
from hmmlm.experiments.catalogue import STUDIES
from hmmlm.experiments.catalogue.run import BASELINE, Run
from hmmlm.experiments.records import add_record
from hmmlm.experiments.results import gather
from hmmlm.experiments.studies import SPEEDS, command, perform, with_settings
from hmmlm.learning.config import load_recipe
from hmmlm.learning.config_baseline import BaselineConfig
from hmmlm.learning.loop import Trainer


@pytest.mark.parametrize("study", STUDIES)
def test_every_run_is_valid_and_its_command_gives_the_same_settings(study: str) -> None:
    for run in {run.row: run for run in STUDIES[study]}.values():  # of one seed: parsing is slow
        program, name, *words = shlex.split(command(run))
        assert (program, name) == ("hmmlm", "baseline" if run.recipe == BASELINE else "train")
        if run.recipe == BASELINE:
            parsed = parse(baseline.Arguments, words, "baseline", "", baseline.Arguments(BaselineConfig())).run
        else:
            parsed = _parse(words, load_recipe(run.recipe)).run
        assert parsed == with_settings(run)


def tiny(**settings: object) -> Run:
    """A blocked model small enough for a test, on the corpus that every Python carries."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return Run("embedded, blocked", "ptb-vl-hmm", {
        "data": "embedded", "tokenizer.vocab_size": 1500, "tokenizer.split": "words", "model.states": 128,
        "model.blocks": 16, "model.hidden": 32, "train.precision": "32-true", "train.device": "cpu",
        "optimizer.rate": 0.02, "train.max_tokens": 40_000, "train.log_every": 5, **named})


def test_a_blocked_model_learns_on_the_embedded_corpus(tmp_path: Path) -> None:
    record = perform(tiny(), tmp_path)
    metrics = record["metrics"]
    run = next(tmp_path.iterdir())
    unigram = gather(run).baselines["unigram"]["valid"]
    assert metrics["valid_perplexity"] < 0.75 * unigram  # untrained networks are far above it
    assert metrics["tokens"] >= 40_000 and metrics["step_ms"] > 0
    assert record["command"].startswith("hmmlm train --recipe ptb-vl-hmm --data embedded")
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert all(math.isfinite(event["loss"]) for event in history)
    assert {path.name for path in run.iterdir() if path.is_symlink()} == {"best", "final"}
    assert not list(run.rglob("state.*")) and list((run / "best").iterdir())  # the model stays


def test_a_baseline_is_performed_like_any_run(tmp_path: Path) -> None:
    settings = {
        "data": "embedded", "tokenizer.vocab_size": 500, "model.kind": "feedforward", "model.hidden": 16, "rate": 0.01,
        "train.device": "cpu", "train.max_tokens": 40_000, "betas": [0.8, 0.99],
    }  # fmt: skip
    record = perform(Run("embedded, FF 5-gram", BASELINE, settings, 1), tmp_path, alone=False)
    assert " --betas 0.8 0.99 " in record["command"]
    assert json.loads((next(tmp_path.iterdir()) / "config.json").read_text())["betas"] == [0.8, 0.99]
    metrics = record["metrics"]
    assert metrics["tokens"] >= 40_000 and 0 < metrics["epochs"] < 1 and metrics["best_step"] > 0
    assert not set(SPEEDS) & set(metrics)  # others may have been on the machine
    assert not list(tmp_path.rglob("state.*")) and list(tmp_path.glob("*/best/*"))
    assert 1 < metrics["valid_perplexity"] < 250 and 1 < metrics["train_perplexity"] < 500  # half of the 500 words
    assert record["command"].startswith("hmmlm baseline --data embedded --tokenizer.vocab-size 500")


def test_a_run_that_fails_to_train_has_a_record_that_says_so(tmp_path: Path) -> None:
    record = perform(tiny(optimizer__rate=1e30, optimizer__clip=1e30, schedule__kind="constant"), tmp_path / "work")
    assert record["metrics"] == {} and record["commit"]
    assert "loss in training is nan" in record["stopped"] and str(tmp_path) not in record["stopped"]


def test_an_interrupted_run_has_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Trainer.read_window

    def interrupted(self: Trainer) -> list[float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return read(self)

    monkeypatch.setattr(Trainer, "read_window", interrupted)
    with pytest.raises(InputError, match="interrupted: it has no record"):
        perform(tiny(train__log_every=1), tmp_path)


def test_a_study_goes_on_where_it_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def perform(run: Run, work: Path, alone: bool) -> dict[str, object]:
        return {"row": run.row, "seed": run.seed, "settings": run.settings, "metrics": {"alone": alone}}

    monkeypatch.setattr(studies, "perform", perform)
    monkeypatch.setattr(studies, "ProcessPoolExecutor", lambda jobs, mp_context: ThreadPoolExecutor(jobs))
    monkeypatch.setitem(STUDIES, "tiny", [replace(tiny(), seed=seed) for seed in (1, 2)])

    def runs(*words: str) -> dict[int, bool]:
        """The records after a run of the study, in their order: seed and whether it was alone."""
        studies.main(["tiny", "--out", str(tmp_path), "--set", "model.hidden=16", *words])
        records = json.loads((tmp_path / "tiny.json").read_text())
        return {record["seed"]: record["metrics"]["alone"] for record in records}

    assert runs("--seeds", "2") == {2: True}
    assert list(runs("--jobs", "2").items()) == [(2, True), (1, False)]
    assert "1 runs; 1 have a record" in capsys.readouterr().out
    assert list(runs("--again", "--seeds", "2", "--jobs", "2").items()) == [(1, False), (2, False)]
    for words in (["--rows", "huge"], ["--seeds", "3"]):
        with pytest.raises(InputError, match=r"no run of tiny .*; seeds: \[1, 2\]; rows: embedded, blocked$"):
            runs(*words)


def test_records_replace_those_of_the_same_run_and_keep_others(tmp_path: Path) -> None:
    file = tmp_path / "study.json"
    record = {"row": "a", "seed": 0, "settings": {}, "metrics": {"valid_perplexity": 3.0}}
    for changed in (record, {**record, "seed": 1}, {**record, "metrics": {"valid_perplexity": 2.0}}):
        add_record(file, changed)
    kept = {(r["row"], r["seed"]): r["metrics"]["valid_perplexity"] for r in json.loads(file.read_text())}
    assert kept == {("a", 0): 2.0, ("a", 1): 3.0}
