"""`hmmlm train --dry-run`: what a run would cost, without a run."""

import shlex
from pathlib import Path

import pytest
from helpers.commands import failure, write_corpus

from hmmlm.cli.main import main
from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.runs.progress import Progress
from hmmlm.terminal import time_text
from hmmlm.training import estimate as module
from hmmlm.training.estimate import estimate

BATCHES = {"batch_size": 4, "length": 8}
MODELS = [
    {"kind": "scalar", "num_states": 4},
    {"kind": "linear", "num_states": 4},
    {"kind": "neural", "num_states": 8, "blocks": 2, "hidden": 8},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "animals.txt")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model["kind"]))
def test_an_estimate_is_the_sum_of_its_steps_and_checks(
    model: dict[str, object], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(10**6))  # a clock of one second per reading
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(ticks)))
    values = {"data": str(corpus), "model": model, "batches": BATCHES, "train": {"epochs": 5, "checks_per_epoch": 2}}
    found = estimate(read_config(RunConfig, values, "test"), Progress())
    assert found.epochs == 5 and found.checks_per_epoch == 2
    assert found.steps_per_epoch > 1 and found.memory > 1e7 and "parameters" in found.about
    assert found.step_seconds > 0 and found.check_seconds >= 1
    assert found.epoch_seconds == found.steps_per_epoch * found.step_seconds + 2 * found.check_seconds


def test_a_dry_run_prints_the_estimate_and_writes_nothing(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    line = f"train --data {corpus} --model.num-states 4 --batches.batch-size 4 --batches.length 8 --dry-run --quiet"
    assert main(shlex.split(line)) == 0
    printed = capsys.readouterr().out
    for part in ("parameters", "memory:", "step:", "4 × 8 tokens", "epoch:", "run:"):
        assert part in printed
    assert set(tmp_path.rglob("*")) == before


def test_a_dry_run_is_of_a_new_run(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--model.num-states 4 --batches.batch-size 4 --batches.length 8 --train.epochs 1 --no-train.tensorboard"
    assert main(shlex.split(f"train --data {corpus} --out {tmp_path / 'run'} {small} --quiet")) == 0
    capsys.readouterr()
    assert "leave out --resume" in failure(capsys, "train", "--resume", str(tmp_path / "run"), "--dry-run")


def test_times_have_a_unit() -> None:
    assert [time_text(s) for s in (0.0253, 1.77, 34.4, 119, 312, 11_000)] == [
        "25 ms",
        "1.8 s",
        "34 s",
        "120 s",
        "5.2 min",
        "3.1 h",
    ]
