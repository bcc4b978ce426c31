"""Folders of runs: a new one belongs to one process, and nothing that exists is overwritten."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hmmlm.config.explain import explain
from hmmlm.config.training import AnyConfig, TrainingConfig
from hmmlm.data.files import exclusive, read_json, write_bytes, write_new
from hmmlm.errors import InputError
from hmmlm.runs.history import HISTORY, read_history

CONFIG = "config.json"
BLOCKS = "blocks.json"
"""File with the block of each word, of a model with blocks."""
LOCK = ".lock"
"""File that is locked while a process works in the folder."""
LATEST = "latest"
"""The name of the newest run, in every command that takes a run."""
FOLDERS = {"train": "runs", "teacher": "teachers", "baseline": "baselines"}
"""The folder of the runs of each command."""
PREPARED = (CONFIG, "tokenizer", "data", BLOCKS)
"""The files and folders of a run before training starts."""
CHANGEABLE = frozenset(
    {
        "chosen",
        "data_folder",
        "train.epochs",
        "train.max_tokens",
        "train.device",
        "train.devices",
        "train.checkpoint_every",
        "train.tensorboard",
    }
)
"""Settings that may differ when a run is resumed."""


def saved_config(kind: type[AnyConfig], out: Path) -> AnyConfig:
    """Return the configuration of the run in `out`."""
    path = Path(out) / CONFIG
    if not path.exists():
        raise InputError(f"no run to resume in {out}: {path} does not exist")
    try:
        return kind.model_validate(read_json(path))
    except ValidationError as error:
        raise InputError(
            f"{path} does not belong to a run of `hmmlm {kind.command}` of this version ({explain(kind, error)}): "
            "use the command and the version that started the run, or start a new run"
        ) from None


def list_runs(parent: Path, command: str = "train") -> list[Path]:
    """Return the runs of a command in a folder, the newest (started or resumed) last."""
    folders = parent.iterdir() if parent.is_dir() else ()
    found = [folder for folder in folders if _is_run(folder) and _command(folder) == command]
    return sorted(found, key=lambda run: (run / CONFIG).stat().st_mtime_ns)


def find_run(path: Path, command: str = "train") -> Path:
    """Return a path, or the newest run of a command, in the folder of its runs, if the path is "latest"."""
    if str(path) != LATEST or path.exists():
        return path
    parent = FOLDERS[command]
    runs = list_runs(Path(parent), command)
    if not runs:
        raise InputError(
            f"there are no runs in the folder {parent}, so there is no latest one: give the folder of a run"
        )
    return runs[-1]


def refuse_changes(saved: TrainingConfig, given: TrainingConfig, out: Path) -> None:
    """Raise an InputError that names the first setting that a resumed run may not change."""
    before, now = flat_settings(saved.dump()), flat_settings(given.dump())
    # Kinds first: a different kind is the reason for other differences.
    for name, value in sorted(now.items(), key=lambda item: not item[0].endswith(".kind")):
        if name not in CHANGEABLE and before.get(name) != value:
            raise InputError(
                f"{name} is {value!r}, but the run in {out} has {before.get(name)!r}: leave it as it is, or start a "
                f"new run in another folder (may change: {', '.join(sorted(CHANGEABLE))})"
            )


def flat_settings(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flat_settings(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


@contextmanager
def lock_run(out: Path) -> Iterator[None]:
    """Let no other process write to `out` until the block, or the process, ends."""

    def refuse() -> None:
        raise InputError(f"{out} is in use by another process: wait until it ends, or stop it first")

    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        with exclusive(out / LOCK, refuse):
            try:
                yield
            finally:
                if not (out / CONFIG).exists():  # no run was started here
                    (out / LOCK).unlink(missing_ok=True)
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def refuse_lost(out: Path, command: str) -> None:
    """Raise an InputError if the run in `out` has no checkpoint, but had one: then it has a history or models."""
    history = read_history(out / HISTORY) if (out / HISTORY).exists() else []
    models = [out / link for link in ("best", "final") if (out / link).exists()]
    if models or history:
        kept = f"; {' and '.join(map(str, models))}, its trained models, stay as they are" if models else ""
        raise InputError(
            f"the run in {out} has started, but its checkpoint {out / 'last'} is gone, so it cannot be resumed: put it "
            f"back, or start anew in another folder with `hmmlm {command} --out FOLDER`{kept}"
        )


def refuse_used(out: Path) -> None:
    """Raise an InputError unless `out` is new or an empty folder."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: give the name of a new folder")
    if not out.is_dir():
        return
    if _is_run(out):
        raise InputError(f"{out} already contains a run: continue it with --resume {out}, or choose another folder")
    there = sorted(path.name for path in out.iterdir() if not _is_left_over(path.name))
    if there:
        more = ", …" if len(there) > 1 else ""
        raise InputError(f"{out} is not empty ({there[0]}{more}): give the name of a new folder")


def refuse_shorter(out: Path, epoch: int, tokens: int, total: int, batch: int) -> None:
    """Raise an InputError if a resumed run is already beyond its new `total` of tokens, by more than a last `batch`."""
    if tokens - total >= batch:
        raise InputError(
            f"the run in {out} already has {tokens:,} tokens (epoch {epoch}), more than the {total:,} of these "
            "settings: leave out train.epochs and train.max_tokens, increase them, or start a run in another folder"
        )


def _is_run(out: Path) -> bool:
    try:
        return {"data", "tokenizer", "train"} <= read_json(out / CONFIG).keys()
    except InputError:  # no configuration, or that of another program
        return False


def _command(out: Path) -> str:
    """Return the command that started the run in `out`."""
    config = read_json(out / CONFIG)
    if "initialization" in config:
        return "train"
    return "baseline" if isinstance(config.get("model"), dict) and "kind" in config["model"] else "teacher"


def _is_left_over(name: str) -> bool:
    """Return whether a file is a leftover of a killed process (see `hmmlm.data.files`)."""
    return name == LOCK or (name.startswith(".") and name.endswith((".tmp", ".new")))


@contextmanager
def new_folder(given: Path | None, parent: str, name: str) -> Iterator[Path]:
    """Yield the folder `given` for a new run, or create parent/name-TIME, with -2, -3, … appended if that exists.

    A folder created here is removed again if it stays empty.
    """
    if given is not None:
        refuse_used(given)
        yield given
        return
    out = base = Path(parent) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    made = [] if base.parent.exists() else [base.parent]
    for number in count(2):
        try:
            out.mkdir(parents=True)  # processes that start in the same second get different folders
            break
        except FileExistsError:
            out = base.with_name(f"{base.name}-{number}")
        except OSError as error:
            raise InputError(f"cannot create {out}: {error.strerror or error}; give --out a folder elsewhere") from None
    try:
        yield out
    finally:
        for folder in (out, *made):
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def new_run(out: Path, settings: bytes, begun: bool = False) -> Iterator[None]:
    """Make `out`, new or empty, the folder of a run with these settings; the block prepares it.

    `begun`: the run was started there before, and killed before its first checkpoint.
    """
    if begun:
        write_bytes(out / CONFIG, settings)
        yield
        return
    refuse_used(out)
    made = not out.exists()
    if not write_new(out / CONFIG, settings):
        raise InputError(f"another run has just started in {out}: choose another folder")
    with removed_on_failure(out, PREPARED, made):
        yield


@contextmanager
def removed_on_failure(out: Path, names: Sequence[str], made: bool) -> Iterator[None]:
    """If the block fails, remove the files `names` from `out`, and `out` itself if it was `made` for the block."""
    try:
        yield
    except BaseException:
        for path in (out / name for name in names):
            with suppress(OSError):
                path.unlink() if path.is_file() else shutil.rmtree(path)
        if made:
            with suppress(OSError):
                out.rmdir()
        raise
