"""A run that is killed at any moment and resumed equals the uninterrupted run: bit for bit on the CPU."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import failure, run_python
from helpers.network_runs import interrupt_after, write_pairs
from helpers.processes import run_process
from helpers.runs import Interrupting, assert_same_run, tiny_config, write_text

import hmmlm
from hmmlm.config.networks import BaselineConfig, TeacherConfig
from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.data import files, modelfolder
from hmmlm.data.tensorfiles import write_tensors
from hmmlm.errors import InputError
from hmmlm.learning.fit import Fit
from hmmlm.learning.learners import AdamWLearner, BaumWelchLearner
from hmmlm.runs import checkpoint
from hmmlm.runs.checkpoint import read_checkpoint, remove_folder
from hmmlm.runs.folders import saved_config
from hmmlm.runs.history import History
from hmmlm.runs.progress import Progress, ProgressPhase
from hmmlm.training.networks import train_baseline, train_teacher
from hmmlm.training.train import train

MINI_BATCH = {"kind": "baum-welch", "full_batch": False, "pseudocount": 0.1, "momentum": 0.5, "step": 0.5}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "baum-welch": {"optimizer": MINI_BATCH},
    "full batch": {"optimizer": {"kind": "baum-welch", "full_batch": True, "pseudocount": 0.1, "momentum": 0.5}},
    "neural": {"model": {"kind": "neural", "blocks": 2, "hidden": 8, "dropout": 0.5, "network_dropout": 0.1}},
    "blocked scalar": {"model": {"blocks": 2, "dropout": 0.5}},
    "plateau": {"schedule": {"kind": "plateau", "warmup": 20, "patience": 1}, "optimizer": {"lr": 3.0}},
    "diverging": {"schedule": {"kind": "constant", "warmup": 0.0}, "optimizer": {"lr": 30.0, "eps": 1e-8}},
    "restarts": {"train": {"restarts": 3}},
    "bigram": {"model": {"blocks": 2}, "initialization": {"kind": "bigram"}},
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
        (checkpoint, "write_tensors"),
        (modelfolder, "write_tensors"),
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


@pytest.mark.slow
def test_killed_repeatedly_and_resumed(straight: tuple[RunConfig, Path], tmp_path: Path) -> None:
    """Kill every process some events after its start: while preparing, stepping, saving, swapping, deleting."""
    config, expected = straight
    kills = 0
    for kill_at in (1, 8, 15, 30, 31, 33, 34, 35, 37, 38, 40, 58, 75):
        kills += run_process(train_until_killed, config.dump(), tmp_path, kill_at) == -signal.SIGKILL
        if (tmp_path / "last").exists():
            read_checkpoint(tmp_path / "last")
    assert kills >= 9
    assert train(config, tmp_path, resume=True).finished
    assert_same_run(tmp_path, expected)


@pytest.mark.parametrize(
    "after", [pytest.param(1, marks=pytest.mark.slow), 7, pytest.param(13, marks=pytest.mark.slow)]
)
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


@pytest.mark.slow
def test_stopped_in_any_check_and_resumed(straight: tuple[RunConfig, Path], tmp_path: Path) -> None:
    """Among them are checks at the end of an epoch and of the run, after which no step follows."""
    config, expected = straight
    stopped = 0
    for after in range(1, 100):
        out = tmp_path / str(after)
        if train(config, out, progress=Interrupting("valid", after)).finished:
            break
        stopped += 1
        assert train(saved_config(RunConfig, out), out, resume=True).finished
        assert_same_run(out, expected)
    checks = (expected / "history.jsonl").read_text().count('"valid"')
    assert stopped >= checks > 1


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
    left, write_tensors = 4, checkpoint.write_tensors

    def full(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_tensors(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", full)
        with pytest.raises(InputError, match=r"No space left on device.*--resume"):
            train(config, tmp_path)
    read_checkpoint(tmp_path / "last")
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
    ours, theirs = (read_checkpoint(tmp_path / name / "last")[0] for name in ("run", "straight"))
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
    changed["optimizer"]["max_grad_norm"] = 0.25
    with pytest.raises(InputError, match=r"optimizer\.max_grad_norm is 0\.25, but the run in .* has 1\.0"):
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
        with pytest.raises(InputError, match=rf"state\.json has no {missing}: it is damaged"):
            train(config, run, resume=True)
    (run / "last" / "state.json").write_text(json.dumps(state))
    other = tiny_config(config.data, model={"num_states": 5})
    train(other, tmp_path / "other", progress=Interrupting("train", 7))
    shutil.copy(tmp_path / "other" / "last" / "state.safetensors", run / "last" / "state.safetensors")
    with pytest.raises(InputError, match=r"state\.safetensors: .* is float64 \[3, 5\], state\.json has .* \[3, 4\]"):
        train(config, run, resume=True)


def damage_json(run: Path, *names: str, value: Any = None) -> None:
    """Set an entry of a checkpoint's JSON file, or remove it."""
    path = run / "last" / "state.json"
    state = entry = json.loads(path.read_text())
    for name in names[:-1]:
        entry = entry[name]
    entry[names[-1]] = value
    if value is None:
        del entry[names[-1]]
    path.write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("names", "value", "message"),
    [
        (("position", "step"), None, r"state\.json has no position\.step"),
        (("position", "step"), "7", r"position\.step is of type str, not int"),
        (("position", "tokens"), -1, r"position\.tokens is -1, not a number of at least 0"),
        (("position", "initialized"), 1, r"position\.initialized is of type int, not bool"),
        (("position", "index"), 10**6, r"position\.index is 1000000, but must be below"),
        (("position",), [1], r"position is of type list, not dict"),
        (("plateau", "checks"), None, r"has no plateau\.checks"),
        (("plateau", "best"), "x", r"plateau\.best is of type str, not float"),
        (("optimizer", "unseen"), None, r"has no optimizer\.unseen"),
        (("optimizer", "unseen"), "x", r"optimizer\.unseen is of type str, not list"),
        (("window_tokens",), 3, r"window_tokens is of type int, not list"),
        (("window_tokens",), [3, "x"], r"window_tokens\[1\] is of type str, not int"),
        (("window_tokens",), [3] * 9, r"the length of window_tokens is 9, but must be below 4"),
        (("vocabulary", "size"), None, r"has no vocabulary\.size"),
    ],
)
def test_a_wrong_entry_of_the_state_is_named(
    stopped: tuple[RunConfig, Path], names: tuple[str, ...], value: Any, message: str
) -> None:
    config, run = stopped
    damage_json(run, *names, value=value)
    with pytest.raises(InputError, match=message) as error:
        train(config, run, resume=True)
    assert str(run / "last" / "state.json") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("entry", ["parameters.", "optimizer.", "carry.log_probs", "window", "rng.cpu"])
def test_a_wrong_tensor_of_the_state_is_named(stopped: tuple[RunConfig, Path], entry: str) -> None:
    config, run = stopped
    path = run / "last" / "state.safetensors"
    tensors = {name: tensor.clone() for name, tensor in read_checkpoint(run / "last")[0].items()}
    name = max(n for n in tensors if n.startswith(entry) and tensors[n].dim())
    wrong: dict[str, torch.Tensor | None] = {"missing": None, "short": tensors[name][:-1]}
    other = torch.float64 if tensors[name].dtype == torch.float32 else torch.float32
    wrong |= {"mistyped": tensors[name].to(other), "another rank": tensors[name][None]}
    for described in (True, False):  # earlier versions did not write which tensors there are
        if not described:
            damage_json(run, "tensors")
            damage_json(run, "checksum")
        for change in wrong.values() if described or entry != "carry.log_probs" else [None]:
            path.unlink()
            write_tensors(path, {n: t for n, t in (tensors | {name: change}).items() if t is not None})
            with pytest.raises(
                InputError, match="has no carry" if entry == "carry.log_probs" and not described else name
            ):
                train(config, run, resume=True)


def flip_a_bit(path: Path) -> None:
    """Damage the last byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = tiny_config(write_text(tmp_path)), tmp_path / "run"
    train(config, tmp_path / "straight")
    with monkeypatch.context() as patch:
        interrupt_after(7, patch)
        train(config, run)
    flip_a_bit(run / "last" / "state.safetensors")
    with pytest.raises(InputError, match=r"is damaged: its bytes .* continue from .* `mv -T (\S+) (\S+)`") as error:
        train(config, run, resume=True)
    subprocess.run(str(error.value).split("`")[1].split(), check=True)
    assert read_checkpoint(run / "last")[1]["position"]["step"] == 5
    assert train(config, run, resume=True).finished
    assert_same_run(run, tmp_path / "straight")


# --- nothing is lost ---


def prepare_and_die(config: dict[str, Any], folder: Path) -> None:
    """Start a run in folder/run that is killed before its first checkpoint, in a process of its own."""
    Fit.run = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
    train(read_config(RunConfig, config), folder / "run")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_whose_checkpoint_is_gone_is_not_started_over(
    tmp_path: Path, finished: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run = tiny_config(write_text(tmp_path)), tmp_path / "run"
    train(config, run, progress=Progress() if finished else Interrupting("train", 3))  # before its first check
    remove_folder(run, "last")
    before = content(run)
    error = failure(capsys, "train", "--resume", str(run), "--train.epochs", "9")
    assert f"its checkpoint {run / 'last'} is gone, so it cannot be resumed" in error
    assert "start anew in another folder with `hmmlm train --out FOLDER`" in error
    assert ("best" in error) == finished
    assert content(run) == before


@pytest.mark.slow
def test_a_run_in_use_is_locked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both resumes from inside the run that goes on: in this process and in another one."""
    config, run = tiny_config(write_text(tmp_path)), tmp_path / "run"
    train(config, tmp_path / "alone")
    refused: list[str] = []

    class Beside(Progress):
        @contextmanager
        def phase(
            self, name: str, total: int | None = None, unit: str = "tokens", done: int = 0
        ) -> Iterator[ProgressPhase]:
            yield ProgressPhase()
            if name == "valid" and not refused:
                refused.append(failure(capsys, "train", "--resume", str(run)))
                program = "import sys; from hmmlm.cli.main import main; sys.exit(main(sys.argv[1:]))"
                ended = run_python(program, "train", "--resume", str(run))
                assert ended.returncode == 2
                refused.append(ended.stderr)

    assert train(config, run, progress=Beside()).finished
    assert len(refused) == 2
    for error in refused:
        assert error.startswith(f"hmmlm: error: {run} is in use by another process: wait until it ends, ")
        assert error.count("\n") == 1
    assert_same_run(run, tmp_path / "alone")
    assert train(config, run, resume=True).finished


def test_two_new_runs_in_one_folder(tmp_path: Path) -> None:
    """The second one starts while the first prepares its text."""
    config, run = tiny_config(write_text(tmp_path)), tmp_path / "run"
    refused: list[str] = []

    class Beside(Progress):
        def note(self, line: str) -> None:
            if line.startswith("reading"):
                for resume in (False, True):
                    with pytest.raises(InputError) as error:
                        train(config, run, resume)
                    refused.append(str(error.value))

    assert train(config, run, progress=Beside()).finished
    assert "already contains a run" in refused[0] and "in use by another process" in refused[1]


@pytest.mark.slow
def test_a_run_without_a_checkpoint_tells_that_its_text_has_changed(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    config, notes = tiny_config(text), []

    class Noting(Progress):
        def note(self, line: str) -> None:
            notes.append(line)

    ended = run_process(prepare_and_die, config.dump(), tmp_path)
    assert ended == -signal.SIGKILL and not (tmp_path / "run" / "last").exists()
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    assert train(config, tmp_path / "same", resume=True, progress=Noting()).finished
    assert not any("has changed" in note for note in notes)
    text.write_text(text.read_text() + "\nd d d d a a a\n" * 20)
    assert train(config, tmp_path / "run", resume=True, progress=Noting()).finished
    assert f"{text} has changed since this run was started: the present text is used" in notes
    assert train(config, tmp_path / "new").finished
    assert_same_run(tmp_path / "run", tmp_path / "new")


# --- files ---


def test_two_equal_runs_write_equal_files_that_others_can_read(tmp_path: Path) -> None:
    config = tiny_config(write_text(tmp_path))
    for name in "ab":
        train(config, tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    before = os.umask(0)
    os.umask(before)
    kept = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o666 & ~before}


def test_the_last_model_is_not_stored_twice_if_it_is_the_best(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    improving = {"schedule": {"kind": "constant", "warmup": 0}, "train": {"epochs": 1, "checks_per_epoch": 1}}
    train(tiny_config(text, **improving), tmp_path / "run")
    run = tmp_path / "run"
    assert (run / "best").resolve() == (run / "final").resolve()
    longer = {**improving, "train": {"epochs": 2, "checks_per_epoch": 1}}
    assert train(tiny_config(text, **longer), run, resume=True).finished
    stored = sorted(path.name.partition("-")[0] for path in (run / "checkpoints").iterdir())
    assert stored in (["best", "step", "step"], ["best", "final", "step", "step"])
    assert hmmlm.load(run / "final").hmm.num_states == 4
