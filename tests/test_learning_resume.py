"""A run that is killed at any moment and resumed ends as the run that was left alone: bit for bit."""

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
from learning_runs import tiny_config, write_text

import hmmlm
from hmmlm.data import files
from hmmlm.errors import InputError
from hmmlm.learning import checkpoint, updaters
from hmmlm.learning.checkpoint import read_state
from hmmlm.learning.config import RunConfig, config_from_dict, config_to_dict
from hmmlm.learning.history import History, read_history
from hmmlm.learning.progress import Phase, Progress
from hmmlm.learning.trainer import saved_config, train

TIMES = ("seconds", "tokens_per_second")
BAUM_WELCH = {
    "kind": "baum-welch",
    "baum_welch": {"full_batch": False, "accumulate": 2, "pseudocount": 0.1, "momentum": 0.5, "step": 0.5},
}


@pytest.fixture(scope="module", params=[{}, BAUM_WELCH], ids=["adamw", "baum-welch"])
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """A configuration, and a run of it that nobody disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    config = tiny_config(write_text(folder), optimizer=request.param)
    assert train(config, folder / "run").finished
    return config, folder / "run"


def assert_same_run(run: Path, other: Path) -> None:
    (tensors, state), (expected, expected_state) = read_state(run / "last"), read_state(other / "last")
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name
    for position in (state["position"], expected_state["position"]):
        del position["seconds"]
    assert state == expected_state
    assert without_times(run) == without_times(other)
    for model in ("best", "final"):
        ours, theirs = (hmmlm.load(folder / model).hmm.parameters for folder in (run, other))
        assert all(map(torch.equal, ours, theirs))


def without_times(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k not in TIMES} for r in read_history(run / "history.jsonl")]


@contextmanager
def at_every_event(happen: Callable[[], None]) -> Iterator[None]:
    """Call `happen` before every step, every record, and every call that changes a file."""
    places: list[tuple[Any, str]] = [
        (updaters.AdamW, "step"), (updaters.BaumWelch, "step"), (History, "write"), (files.os, "replace"),
        (checkpoint.os, "rename"), (checkpoint, "save_file"), (checkpoint, "_fsync"), (checkpoint.shutil, "rmtree"),
        (Path, "symlink_to"), (Path, "write_text"),
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in places:
            original = getattr(owner, name)

            def watched(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                happen()
                return _original(*args, **kwargs)

            patch.setattr(owner, name, watched)
        yield


def train_until_killed(config: dict[str, Any], out: Path, kill_at: int) -> None:
    """In a child process: start or resume, and die at an event."""
    events = 0

    def happen() -> None:
        nonlocal events
        events += 1
        if events == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with at_every_event(happen):
        train(config_from_dict(config), out, resume=(out / "config.json").exists())


def in_child(config: RunConfig, out: Path, kill_at: int) -> int | None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "hmmlm.learning.trainer"])
    child = context.Process(target=train_until_killed, args=(config_to_dict(config), out, kill_at))
    child.start()
    child.join()
    return child.exitcode


def test_killed_again_and_again_then_resumed(straight: tuple[RunConfig, Path], tmp_path: Path) -> None:
    """Every process is killed some events after its start: while preparing, stepping, saving, swapping, deleting."""
    config, expected = straight
    kills = 0
    for kill_at in (1, 8, 15, 30, 31, 33, 34, 35, 37, 38, 40, 58, 75):
        kills += in_child(config, tmp_path, kill_at) == -signal.SIGKILL
        if (tmp_path / "last").exists():
            read_state(tmp_path / "last")
    assert kills >= 9
    assert train(config, tmp_path, resume=True).finished
    assert_same_run(tmp_path, expected)


class Interrupting(Progress):
    """Sends a signal to this process from inside a phase."""

    def __init__(self, name: str, after: int, number: signal.Signals) -> None:
        self.name, self.left, self.number = name, after, number

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "tokens", done: int = 0) -> Iterator[Phase]:
        interrupting, phase = self, Phase()

        class Sender(Phase):
            def advance(self, amount: int, **figures: str) -> None:
                interrupting.left -= amount > 0
                if interrupting.left == 0 and amount:
                    os.kill(os.getpid(), interrupting.number)

        yield Sender() if name == self.name else phase


@pytest.mark.parametrize(
    ("phase", "after", "number"), [("train", 7, signal.SIGINT), ("valid", 2, signal.SIGTERM)], ids=["step", "check"]
)
def test_interrupted_saves_and_says_how_to_resume(
    straight: tuple[RunConfig, Path], tmp_path: Path, phase: str, after: int, number: signal.Signals
) -> None:
    config, expected = straight
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    result = train(config, tmp_path, progress=Interrupting(phase, after, number))
    assert not result.finished
    assert f"hmmlm train --resume {tmp_path}" in result.message
    assert result.steps == 7 or phase == "valid"
    assert not (tmp_path / "final").exists()
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert train(saved_config(tmp_path), tmp_path, resume=True).finished
    assert_same_run(tmp_path, expected)


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

    train(straight[0], tmp_path, progress=Interrupting("train", 4, signal.SIGINT))
    monkeypatch.setattr(History, "sync", full)
    with pytest.raises(InputError, match=r"cannot write in .*No space left on device; the last checkpoint, .*whole"):
        train(straight[0], tmp_path, resume=True)


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    steady: dict[str, Any] = {"schedule": {"kind": "constant", "warmup_fraction": 0}}
    short, long = (tiny_config(text, **steady, train={"epochs": epochs}) for epochs in (1, 2))
    train(long, tmp_path / "straight")
    train(short, tmp_path / "run")
    assert train(long, tmp_path / "run", resume=True).epochs == 2
    ours, theirs = (read_state(tmp_path / name / "last")[0] for name in ("run", "straight"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs if name.startswith("parameters."))


@pytest.fixture
def stopped(tmp_path: Path) -> tuple[RunConfig, Path]:
    """A run stopped in the middle of an epoch."""
    config = tiny_config(write_text(tmp_path))
    train(config, tmp_path / "run", progress=Interrupting("train", 7, signal.SIGINT))
    return config, tmp_path / "run"


def test_a_changed_configuration_is_refused_by_its_field(stopped: tuple[RunConfig, Path]) -> None:
    config, run = stopped
    changed = config_to_dict(config)
    changed["optimizer"]["baum_welch"]["step"] = 0.25
    with pytest.raises(InputError, match=r"optimizer\.baum_welch\.step is 0\.25, but the run in .* has 1\.0"):
        train(config_from_dict(changed), run, resume=True)
    assert saved_config(run) == config


def test_a_run_is_not_overwritten_and_nothing_is_not_resumed(stopped: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, run = stopped
    with pytest.raises(InputError, match="already holds a run: continue it with --resume"):
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
    train(other, tmp_path / "other", progress=Interrupting("train", 7, signal.SIGINT))
    shutil.copy(tmp_path / "other" / "last" / "state.safetensors", run / "last" / "state.safetensors")
    with pytest.raises(InputError, match=r"state\.safetensors: .* this run needs torch\.float32 \[4"):
        train(config, run, resume=True)
