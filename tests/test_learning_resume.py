"""A run that is killed at any moment and resumed equals the uninterrupted run: bit for bit on the CPU."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.network_runs import write_pairs
from helpers.runs import Interrupting, assert_same_run, tiny_config, write_text

from hmmlm.config.networks import BaselineConfig, TeacherConfig
from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.data import files, modelfolder
from hmmlm.errors import InputError
from hmmlm.learning.learners import AdamWLearner, BaumWelchLearner
from hmmlm.learning.train import train, train_baseline, train_teacher
from hmmlm.runs import checkpoint
from hmmlm.runs.checkpoint import read_state
from hmmlm.runs.folders import saved_config
from hmmlm.runs.history import History

MINI_BATCH = {"kind": "baum-welch", "full_batch": False, "pseudocount": 0.1, "momentum": 0.5, "step": 0.5}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "baum-welch": {"optimizer": MINI_BATCH},
    "full batch": {"optimizer": {"kind": "baum-welch", "pseudocount": 0.1, "momentum": 0.5}},
    "neural": {"model": {"kind": "neural", "blocks": 2, "hidden": 8, "dropout": 0.5, "network_dropout": 0.1}},
    "blocked scalar": {"model": {"blocks": 2, "dropout": 0.5}},
    "plateau": {"schedule": {"kind": "plateau", "warmup": 20, "patience": 1}, "optimizer": {"rate": 3.0}},
    "chunks": {"batches": {"kind": "chunks"}, "train": {"precision": "bf16-mixed"}},
}


def undisturbed(tmp_path_factory: pytest.TempPathFactory, kind: str) -> tuple[RunConfig, Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    config = tiny_config(write_text(folder), **SETTINGS[kind])
    assert train(config, folder / "run").finished
    return config, folder / "run"


@pytest.fixture(scope="module", params=["adamw", "baum-welch"])
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """Return a configuration and a run of it that was not interrupted."""
    return undisturbed(tmp_path_factory, request.param)


@pytest.fixture(scope="module", params=SETTINGS)
def any_straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """Return the same for every kind of training."""
    return undisturbed(tmp_path_factory, request.param)


@contextmanager
def at_every_event(happen: Callable[[], None]) -> Iterator[None]:
    """Call `happen` before every step, every record, and every call that changes a file."""
    places: list[tuple[Any, str]] = [
        (AdamWLearner, "step"),
        (BaumWelchLearner, "step"),
        (History, "write"),
        (files.os, "replace"),
        (checkpoint.os, "rename"),
        (checkpoint, "save_file"),
        (modelfolder, "save_file"),
        (checkpoint, "_fsync"),
        (checkpoint.shutil, "rmtree"),
        (Path, "symlink_to"),
        (Path, "write_text"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in places:
            original = getattr(owner, name)

            def watched(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                happen()
                return _original(*args, **kwargs)

            patch.setattr(owner, name, watched)
        yield


def train_until_killed(config: dict[str, Any], out: Path, kill_at: int) -> None:
    """Start or resume in a child process, and kill it at an event."""
    events = 0

    def happen() -> None:
        nonlocal events
        events += 1
        if events == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with at_every_event(happen):
        train(read_config(RunConfig, config), out, resume=(out / "config.json").exists())


def in_child(config: RunConfig, out: Path, kill_at: int) -> int | None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "hmmlm.learning.train"])
    child = context.Process(target=train_until_killed, args=(config.dump(), out, kill_at))
    child.start()
    child.join()
    return child.exitcode


def test_killed_repeatedly_and_resumed(straight: tuple[RunConfig, Path], tmp_path: Path) -> None:
    """Kill every process some events after its start: while preparing, stepping, saving, swapping, deleting."""
    config, expected = straight
    kills = 0
    for kill_at in (1, 8, 15, 30, 31, 33, 34, 35, 37, 38, 40, 58, 75):
        kills += in_child(config, tmp_path, kill_at) == -signal.SIGKILL
        if (tmp_path / "last").exists():
            read_state(tmp_path / "last")
    assert kills >= 9
    assert train(config, tmp_path, resume=True).finished
    assert_same_run(tmp_path, expected)


@pytest.mark.parametrize("after", [1, 7, 13])
def test_interrupted_at_a_step_and_resumed(any_straight: tuple[RunConfig, Path], tmp_path: Path, after: int) -> None:
    config, expected = any_straight
    result = train(config, tmp_path, progress=Interrupting("train", after))
    assert not result.finished and result.steps == after
    assert not (tmp_path / "final").exists()
    assert train(saved_config(RunConfig, tmp_path), tmp_path, resume=True).finished
    assert_same_run(tmp_path, expected)


@pytest.mark.parametrize(
    ("phase", "after", "number"), [("train", 7, signal.SIGINT), ("valid", 2, signal.SIGTERM)], ids=["step", "check"]
)
def test_a_signal_saves_and_restores_the_handlers(
    straight: tuple[RunConfig, Path], tmp_path: Path, phase: str, after: int, number: signal.Signals
) -> None:
    config, expected = straight
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert not train(config, tmp_path, progress=Interrupting(phase, after, number)).finished
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert train(saved_config(RunConfig, tmp_path), tmp_path, resume=True).finished
    assert_same_run(tmp_path, expected)


NETWORKS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "teacher": (TeacherConfig, train_teacher, {"hidden": 8, "layers": 1, "heads": 2}),
    "lstm": (BaselineConfig, train_baseline, {"kind": "lstm", "hidden": 8, "dropout": 0.3}),
    "feedforward": (BaselineConfig, train_baseline, {"kind": "feedforward", "hidden": 8, "dropout": 0.3}),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_networks_are_resumed(kind: str, tmp_path: Path) -> None:
    config_kind, train_network, model = NETWORKS[kind]
    values = {
        "data": str(write_pairs(tmp_path)),
        "model": model,
        "batches": {"batch_size": 4, "length": 16},
        "train": {"epochs": 2, "device": "cpu", "tensorboard": False, "log_every": 5},
    }
    config = read_config(config_kind, values)
    straight = train_network(config, tmp_path / "straight")
    for after in (3, 11):
        resume = (tmp_path / "run").exists()
        result = train_network(config, tmp_path / "run", resume, Interrupting("train", after))
        assert not result.finished and not (tmp_path / "run" / "perplexity.json").exists()
    result = train_network(saved_config(config_kind, tmp_path / "run"), tmp_path / "run", True)
    assert result.finished and result.best_perplexity == straight.best_perplexity
    assert_same_run(tmp_path / "run", tmp_path / "straight")
    assert (tmp_path / "run" / "perplexity.json").exists() == (config_kind is BaselineConfig)


def test_a_full_disk_while_saving_loses_nothing(
    straight: tuple[RunConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, expected = straight
    left, save_file = 4, checkpoint.save_file

    def full(tensors: dict[str, torch.Tensor], path: Path, **kwargs: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_file(tensors, path, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(InputError, match=r"No space left on device.*--resume"):
            train(config, tmp_path)
    read_state(tmp_path / "last")
    assert train(config, tmp_path, resume=True).finished
    assert_same_run(tmp_path, expected)


def test_a_full_disk_while_writing_the_history(
    straight: tuple[RunConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: History) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    train(straight[0], tmp_path, progress=Interrupting("train", 4))
    monkeypatch.setattr(History, "sync", full)
    with pytest.raises(
        InputError, match=r"cannot write in .*No space left on device; the last checkpoint, .*intact: .*--resume"
    ):
        train(straight[0], tmp_path, resume=True)


def test_a_finished_run_can_be_extended(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    steady: dict[str, Any] = {"schedule": {"kind": "constant", "warmup": 0}}
    short, long = (tiny_config(text, **steady, train={"epochs": epochs}) for epochs in (1, 2))
    train(long, tmp_path / "straight")
    train(short, tmp_path / "run")
    assert train(long, tmp_path / "run", resume=True).epochs == 2
    ours, theirs = (read_state(tmp_path / name / "last")[0] for name in ("run", "straight"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs if name.startswith("parameters."))


@pytest.fixture
def stopped(tmp_path: Path) -> tuple[RunConfig, Path]:
    """Return a run that was stopped in the middle of an epoch, and its configuration."""
    config = tiny_config(write_text(tmp_path))
    train(config, tmp_path / "run", progress=Interrupting("train", 7))
    return config, tmp_path / "run"


def test_a_changed_configuration_is_refused_by_its_field(stopped: tuple[RunConfig, Path]) -> None:
    config, run = stopped
    changed = config.dump()
    changed["optimizer"]["clip"] = 0.25
    with pytest.raises(InputError, match=r"optimizer\.clip is 0\.25, but the run in .* has 1\.0"):
        train(read_config(RunConfig, changed), run, resume=True)
    assert saved_config(RunConfig, run) == config


def test_a_changed_kind_is_refused(stopped: tuple[RunConfig, Path]) -> None:
    config, run = stopped
    changed = config.dump() | {"optimizer": {"kind": "baum-welch"}}
    with pytest.raises(InputError, match=r"optimizer\.kind is 'baum-welch', but the run in .* has 'adamw'"):
        train(read_config(RunConfig, changed), run, resume=True)


def test_a_run_is_not_overwritten_and_a_missing_one_is_not_resumed(
    stopped: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    config, run = stopped
    with pytest.raises(InputError, match="already contains a run: continue it with --resume"):
        train(config, run)
    with pytest.raises(InputError, match="no run to resume"):
        train(config, tmp_path / "nothing", resume=True)


def test_the_text_is_not_needed_to_resume(stopped: tuple[RunConfig, Path]) -> None:
    config, run = stopped
    Path(config.data).unlink()
    assert train(config, run, resume=True).finished


def test_another_vocabulary_is_refused(stopped: tuple[RunConfig, Path]) -> None:
    config, run = stopped
    path = run / "last" / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "vocabulary": {"size": 99, "fingerprint": "0123"}}))
    with pytest.raises(InputError, match=r"trained with a vocabulary of 99 tokens \(0123\), the tokenizer has 13"):
        train(config, run, resume=True)


def test_damaged_checkpoints_are_refused_by_name(stopped: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, run = stopped
    state = json.loads((run / "last" / "state.json").read_text())
    for missing in ("position", "vocabulary", "window_tokens"):
        (run / "last" / "state.json").write_text(json.dumps({k: v for k, v in state.items() if k != missing}))
        with pytest.raises(InputError, match=r"state\.json is damaged or of another program"):
            train(config, run, resume=True)
    (run / "last" / "state.json").write_text(json.dumps(state))
    other = tiny_config(config.data, model={"states": 5})
    train(other, tmp_path / "other", progress=Interrupting("train", 7))
    shutil.copy(tmp_path / "other" / "last" / "state.safetensors", run / "last" / "state.safetensors")
    with pytest.raises(InputError, match=r"state\.safetensors: .* this run needs torch\.float32 \[4"):
        train(config, run, resume=True)
