"""Runs that are killed and resumed until they finish equal a run that was left alone, byte for byte.

One test resumes from what a kill before an operation on files leaves on the disk, and from what one in the middle of
the write before it leaves: `make torture` from all of them, otherwise from some, evenly spaced. The other one kills
again and again: before a random operation, after a random number of bytes of a file, or at any time.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.network_runs import write_pairs
from helpers.processes import run_process
from helpers.runs import assert_same_run, tiny_config, write_text

from hmmlm.config.networks import BaselineConfig, TeacherConfig
from hmmlm.config.run import RunConfig
from hmmlm.config.training import TrainingConfig, read_config
from hmmlm.data.tokenizers import WordTokenizer, load_tokenizer
from hmmlm.teachers.gpt import GPT, GPTShape
from hmmlm.training.networks import train_baseline, train_teacher
from hmmlm.training.train import train

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("TORTURE_KILLS", "8"))
"""Random kills of each run."""
LEFT = int(os.environ.get("TORTURE_LEFT", "8"))
"""Folders that a kill leaves, to resume from, of each kind of training."""
KINDS = ["scalar", "blocked", "baum-welch", "lvd", "teacher", "baseline"]
SEED = int(os.environ.get("TORTURE_SEED", "0"))
CHANGES = frozenset(
    f"os.{name}" for name in ("rename", "remove", "mkdir", "rmdir", "link", "symlink", "truncate", "chmod")
) | {"open", "shutil.rmtree", "shutil.copyfile"}
"""Audit events of operations on files."""


class Kind(NamedTuple):
    """A kind of training: its configuration, and the function that runs it."""

    config: type[TrainingConfig]
    train: Callable[..., Any]
    values: dict[str, Any]


def make_kind(name: str, folder: Path) -> Kind:
    """Return a tiny run of every kind of training on a text in `folder`."""
    if name in ("teacher", "baseline"):
        model = {"hidden": 8, "layers": 1}
        values = {
            "data": str(write_pairs(folder)),
            "model": {**model, "heads": 2} if name == "teacher" else {**model, "kind": "lstm", "dropout": 0.3},
            "batches": {"batch_size": 8, "length": 16},
            "train": {"epochs": 2, "device": "cpu", "tensorboard": False, "log_every": 3, "checkpoint_every": 4},
        }
        kind = TeacherConfig if name == "teacher" else BaselineConfig
        return Kind(kind, train_teacher if name == "teacher" else train_baseline, read_config(kind, values).dump())
    text = write_text(folder)
    sections: dict[str, Any] = {
        "scalar": {},
        "blocked": {"model": {"kind": "neural", "blocks": 2, "hidden": 8, "dropout": 0.5, "network_dropout": 0.1}},
        "baum-welch": {"optimizer": {"kind": "baum-welch", "full_batch": False, "pseudocount": 0.1, "momentum": 0.5}},
        "lvd": {"initialization": {"kind": "lvd", "tokens": 250, "labels": "cached", "kmeans": {"tokens": 300}}},
    }[name]
    if name == "lvd":
        sections["initialization"]["teacher"] = str(write_teacher(text, folder / "teacher"))
    return Kind(RunConfig, train, tiny_config(text, train={"tensorboard": True}, **sections).dump())


def write_teacher(text: Path, folder: Path) -> Path:
    """Write a teacher that has the tokenizer of a run on `text`."""
    train(tiny_config(text, train={"max_tokens": 1}), folder.with_name("tokens"))
    tokenizer = load_tokenizer(folder.with_name("tokens") / "tokenizer")
    assert isinstance(tokenizer, WordTokenizer)
    GPT(GPTShape(tokenizer.vocab_size, 8, 1, 2, 16), tokenizer.eos_id).save(folder, tokenizer)
    return folder


class Kill(NamedTuple):
    """When to kill: at an operation on files, where a file would exceed a number of bytes, or after seconds."""

    operation: int = 0
    size: int = 0
    seconds: float = 0.0


def changes(event: str, arguments: tuple[Any, ...], out: Path) -> bool:
    """Return whether an audit event is an operation on files in `out`; paths may be relative to an open folder."""
    if event not in CHANGES:
        return False
    if event in ("os.remove", "os.rmdir") and arguments[1] >= 0:
        return os.readlink(f"/proc/self/fd/{arguments[1]}").startswith(str(out))
    return any(str(out) in str(argument) for argument in arguments)


def train_until_killed(kind: Kind, out: Path, kill: Kill) -> None:
    """Start or resume, and be killed."""
    signal.setitimer(signal.ITIMER_REAL, kill.seconds)  # then SIGALRM ends the process
    if kill.size:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it otherwise
        resource.setrlimit(resource.RLIMIT_FSIZE, (kill.size, kill.size))
    operations = 0

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal operations
        if changes(event, arguments, out):
            operations += 1
            if operations == kill.operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_event)
    kind.train(read_config(kind.config, kind.values), out, resume=(out / "config.json").exists())


def train_and_copy(kind: Kind, out: Path, copies: Path) -> None:
    """Train; before every operation on files, copy the folder of the run as a kill there would leave it."""
    main, copying = threading.main_thread(), False

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal copying
        # A copy is itself made of operations; and while another thread copies, this one would change the folder.
        if copying or threading.current_thread() is not main or not changes(event, arguments, out) or not out.exists():
            return
        copying = True
        shutil.copytree(out, copies / f"{len(os.listdir(copies)):05d}", symlinks=True)
        copying = False

    copies.mkdir()
    sys.addaudithook(on_event)
    kind.train(read_config(kind.config, kind.values), out)


def content(folder: Path) -> dict[str, bytes]:
    """Return the files, links and folders in a folder."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path).encode() if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
    return found


def left_by_kills(copies: Path) -> list[Path]:
    """Return the folders among `copies` that differ, and each with what was written last cut in half."""
    left: list[Path] = []
    before: dict[str, bytes] = {}
    for folder in sorted(copies.iterdir()):
        now = content(folder)
        if now == before:
            continue
        # A file with the content of another was moved or linked, which is never half done.
        known = set(before.values())
        longer = [n for n, data in now.items() if len(data) > len(before.get(n, b"")) + 1 and data not in known]
        grown = [name for name in longer if (folder / name).is_file() and not (folder / name).is_symlink()]
        if grown:
            half = folder.with_name(f"{folder.name}-half")
            shutil.copytree(folder, half, symlinks=True)
            for name in grown:
                os.truncate(half / name, (len(now[name]) + len(before.get(name, b""))) // 2)
            left.append(half)
        left.append(folder)
        before = now
    return left


def in_child(kind: Kind, out: Path, argument: Kill | Path = Kill()) -> int | None:  # noqa: B008 (immutable)
    """Train in a process of its own; return its exit code."""
    return run_process(train_until_killed if isinstance(argument, Kill) else train_and_copy, kind, out, argument)


@pytest.mark.parametrize("name", KINDS)
def test_killed_before_an_operation_or_in_a_write(name: str, tmp_path: Path) -> None:
    kind = make_kind(name, tmp_path)
    assert in_child(kind, tmp_path / "alone", tmp_path / "copies") == 0
    left = left_by_kills(tmp_path / "copies")
    assert len(left) > 100
    first = random.Random(f"{name} {SEED}").random()
    chosen = {int((i + first) * len(left) / LEFT) for i in range(LEFT)} if len(left) > LEFT else range(len(left))
    for i in chosen:
        assert in_child(kind, left[i]) == 0, left[i]
        assert_same_run(left[i], tmp_path / "alone")


@pytest.mark.parametrize("name", KINDS)
def test_killed_at_random_and_resumed(name: str, tmp_path: Path) -> None:
    kind = make_kind(name, tmp_path)
    began = time.monotonic()
    assert in_child(kind, tmp_path / "alone") == 0
    seconds = time.monotonic() - began
    largest = max(path.stat().st_size for path in (tmp_path / "alone").rglob("*") if path.is_file())
    chance = random.Random(f"{name} {SEED}")
    run, kills, endings = tmp_path / "run", 0, 0
    while kills < KILLS:
        operation, size = int(chance.lognormvariate(3.5, 1)) + 1, chance.randrange(1, largest)
        kill = chance.choice([Kill(operation), Kill(size=size), Kill(seconds=chance.uniform(1e-3, seconds))])
        ended = in_child(kind, run, kill)
        assert ended in (0, -signal.SIGKILL, -signal.SIGXFSZ, -signal.SIGALRM)
        kills += ended != 0
        if ended == 0:  # finished: kills of another run begin
            assert_same_run(run, tmp_path / "alone")
            endings += 1
            run = tmp_path / f"run-{endings}"
    assert in_child(kind, run) == 0
    assert_same_run(run, tmp_path / "alone")
