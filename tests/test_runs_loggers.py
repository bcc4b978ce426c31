"""Loggers of a user: the figures of the history, for Fabric's loggers and any object with their methods."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import records, write_text

import hmmlm
from hmmlm.cli.main import main
from hmmlm.errors import InputError
from hmmlm.runs.history import read_history

SMALL: dict[str, Any] = {"model": {"num_states": 4}, "train": {"epochs": 1, "log_every": 1, "device": "cpu"}}


class Recorder:
    """Keeps what it receives; raises the error `broken` when it is to record figures of the event `at`."""

    def __init__(self, broken: Exception | None = None, at: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.broken, self.at = broken, at

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        self.calls.append(("settings", params))
        if self.broken and self.at == "settings":
            raise self.broken

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append(("figures", metrics, step))
        if self.broken and any(name.startswith(self.at) for name in metrics):
            raise self.broken

    def finalize(self, status: str) -> None:
        self.calls.append(("end", status))


def divided(record: dict[str, Any]) -> tuple[str, int, dict[str, Any]]:
    return record.pop("event"), record.pop("step"), record


def test_a_logger_receives_the_settings_and_every_figure_of_the_history(tmp_path: Path) -> None:
    recorder = Recorder()
    hmmlm.train(write_text(tmp_path), tmp_path / "run", loggers=[recorder], **SMALL)
    (_, settings), *figures, end = recorder.calls
    assert settings["model"]["num_states"] == 4 and end == ("end", "success")
    history = [
        ({f"{event}/{name}": value for name, value in figures.items() if not isinstance(value, str)}, step)
        for event, step, figures in map(divided, read_history(tmp_path / "run" / "history.jsonl"))
    ]
    assert [call[1:] for call in figures] == history
    assert {"start/parameters", "train/loss", "valid/perplexity"} <= {
        name for metrics, _ in history for name in metrics
    }


def test_loggers_of_fabric_write_their_files_and_change_nothing(tmp_path: Path) -> None:
    from lightning_fabric.loggers import CSVLogger

    text = write_text(tmp_path)
    alone = hmmlm.train(text, tmp_path / "alone", **SMALL)
    logged = hmmlm.train(text, tmp_path / "run", loggers=[CSVLogger(tmp_path, "csv")], **SMALL)
    assert logged.perplexity(["a b"]) == alone.perplexity(["a b"])
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    (perplexity,) = (float(row["valid/perplexity"]) for row in rows if row["valid/perplexity"])
    (valid,) = records(tmp_path / "run", "valid")
    assert perplexity == valid["perplexity"]


def test_weights_and_biases_records_the_figures_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb pytorch-lightning")
    loggers = pytest.importorskip("pytorch_lightning.loggers", reason="pytorch-lightning is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = loggers.WandbLogger(project="hmmlm", save_dir=tmp_path)
    hmmlm.train(write_text(tmp_path), tmp_path / "run", loggers=[logger], **SMALL)
    wandb.finish()
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    (valid,) = records(tmp_path / "run", "valid")
    assert b"valid/perplexity" in written.read_bytes() and str(valid["perplexity"]).encode() in written.read_bytes()


@pytest.mark.parametrize("at", ["settings", "start/", "train/", "valid/"])
def test_a_logger_that_raises_is_named_and_the_run_can_be_resumed(tmp_path: Path, at: str) -> None:
    run, recorder, other = tmp_path / "run", Recorder(ConnectionError("no route"), at), Recorder()
    with pytest.raises(InputError, match=r"the logger Recorder raised ConnectionError: no route; .*--resume"):
        hmmlm.train(write_text(tmp_path), run, loggers=[other, recorder], **SMALL)
    assert at == "settings" or other.calls[-1] == ("end", "failed")
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    assert len(records(run, "valid")) == 1


@pytest.mark.parametrize("loggers", [Recorder, [Recorder], "csv", [None], 3], ids=str)
def test_what_is_not_a_logger_is_refused(tmp_path: Path, loggers: Any) -> None:
    with pytest.raises(InputError, match=r"loggers.* must be a"):
        hmmlm.train(write_text(tmp_path), tmp_path / "run", loggers=loggers, **SMALL)
    assert not (tmp_path / "run").exists()
