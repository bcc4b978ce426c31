"""Checkpoints that survive a kill at any moment: safetensors and JSON, no pickle.

A folder cannot be replaced atomically, a symbolic link can. So `RUN/last` and `RUN/best` are relative links into
`RUN/checkpoints/`. To save: write everything into a hidden folder there and fsync it; read it back; rename it to its
final name, unless a folder with the same content exists; make a new link to it under a temporary name and rename it
over the old one (the atomic step); then delete what no link points to. `RUN/previous` is the checkpoint before `last`,
`RUN/restore` the one of the best validation check, to which training returns if it diverges.
A kill before the atomic step leaves the old checkpoint, a kill after it the new one; the next save removes the
leftovers. If the disk is full, the hidden folder is removed and the old checkpoint remains.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hmmlm.data.files import is_integer, read_json
from hmmlm.data.tensorfiles import CHECKSUM, file_checksum, read_tensors, write_tensors
from hmmlm.errors import InputError

FORMAT = "hmmlm checkpoint"
VERSION = 2
TENSORS = "state.safetensors"
VALUES = "state.json"
PREVIOUS = "previous"
"""The link to the checkpoint before the last one."""
RESTORE = "restore"
"""The link to the checkpoint of the best validation check."""


@dataclass
class TrainingPosition:
    """The progress of a run, stored in its checkpoints as JSON, except its seconds."""

    epoch: int = 0
    index: int = 0
    """Batches done in this epoch."""
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Stored in the history, so that two equal runs write equal checkpoints."""
    checked: int = 0
    """Step of the last validation check; 0: none yet."""
    initialized: bool = False
    """Whether the initialization is done: clusters exist, and counts or embeddings are assigned."""
    joint_tokens: int = 0
    """Tokens at which training switches from P(O, S) to P(O); fixed when the run starts."""


def save_folder(
    run: Path,
    link: str,
    name: str,
    write: Callable[[Path], None],
    verify: Callable[[Path], None] | None = None,
    previous: str | None = None,
    also: str | None = None,
) -> None:
    """Make `run/link` point to a new folder `run/checkpoints/name` that `write` fills; all or nothing.

    If another link points to a folder with the same content, `run/link` points there too.

    Args:
        verify: reads the folder back from the disk, and raises an InputError if it is not as it was written.
        previous: a second link, to where `run/link` pointed before.
        also: a link that will point to the new folder too.
    """
    store = run / "checkpoints"
    final = store / name
    while final.exists():  # this step was saved before; the target of a link is never modified
        final = final.with_name(final.name + "+")
    partial = store / f".{final.name}.partial"
    try:
        store.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write(partial)
        same = next((folder for folder in _linked(run) if _same_files(folder, partial)), None)
        if same is None:
            for path in (*partial.rglob("*"), partial):
                _fsync(path)
            if verify is not None:
                verify(partial)
            os.rename(partial, final)
            _fsync(store)
        else:
            final = same
        if previous is not None and (run / link).is_symlink():
            _replace_link(run / previous, (run / link).resolve())
        if also is not None:
            _replace_link(run / also, final)
        _replace_link(run / link, final)
        _fsync(run)
    except (OSError, InputError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        kept = f"the previous checkpoint, {run / link}, is intact" if (run / link).exists() else "there was none before"
        raise InputError(
            f"cannot save {final}: {reason}; {kept}: free some disk space, or repair the disk, and "
            f"continue with --resume {run}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _remove_unlinked(store)


def remove_folder(run: Path, link: str) -> None:
    """Remove the link `run/link`, if it exists, and its target."""
    (run / link).unlink(missing_ok=True)
    if (run / "checkpoints").exists():
        _remove_unlinked(run / "checkpoints")


def _replace_link(link: Path, target: Path) -> None:
    """Make `link` point to `target`, atomically."""
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    if link.is_dir() and not link.is_symlink():  # a copy of the run in which links became folders
        os.rename(link, target.with_name(f".{link.name}.unpacked"))
    os.replace(fresh, link)


def _linked(run: Path) -> list[Path]:
    """Return the folders that the links of a run point to."""
    return [path.resolve() for path in run.iterdir() if path.is_symlink()]


def _same_files(folder: Path, other: Path) -> bool:
    """Return whether two folders have the same files."""
    names = {path.name for path in other.iterdir()}
    if not folder.is_dir() or {path.name for path in folder.iterdir()} != names:
        return False
    return not any(filecmp.cmpfiles(folder, other, names, shallow=False)[1:])


def _remove_unlinked(store: Path) -> None:
    kept = _linked(store.parent)
    for path in store.iterdir():
        if path.resolve() not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Write the two files of a checkpoint to resume from."""
    checksum = write_tensors(folder / TENSORS, tensors)
    content = {"format": FORMAT, "version": VERSION, **values, "tensors": _describe(tensors), CHECKSUM: checksum}
    (folder / VALUES).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def verify_checkpoint(folder: Path) -> None:
    """Raise an InputError if the bytes of the tensors on the disk are not those that were written."""
    saved = read_json(folder / VALUES).get(CHECKSUM)  # earlier versions did not write it
    if saved is not None and saved != file_checksum(folder / TENSORS):
        before = folder.with_name(PREVIOUS)
        other = (
            f", or continue from the checkpoint before it, after `mv -T {before} {folder}`" if before.exists() else ""
        )
        raise InputError(
            f"{folder / TENSORS} is damaged: its bytes do not have the checksum {saved!s:.40} of {VALUES}: restore the "
            f"file{other}"
        )


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors (on the CPU) and scalars of a checkpoint.

    Raise an InputError that names a missing or truncated file, or one of another program.
    """
    values = read_json(folder / VALUES)
    if values.get("format") != FORMAT:
        raise InputError(
            f"{folder / VALUES} is not a checkpoint of a training run: another program may have written it"
        )
    if not is_integer(values.get("version"), VERSION):
        raise InputError(
            f"{folder / VALUES} has version {values.get('version')!r}, this hmmlm resumes version {VERSION}: "
            "finish the run with the hmmlm that started it, or start a new run"
        )
    tensors, _ = read_tensors(folder / TENSORS)
    found, saved = _describe(tensors), values.get("tensors")
    if isinstance(saved, dict):  # earlier versions did not write it
        for name in sorted(saved.keys() | found.keys()):
            if saved.get(name) != found.get(name):
                raise InputError(
                    f"{folder / TENSORS}: {name} is {found.get(name, 'missing')}, {VALUES} has "
                    f"{saved.get(name, 'no such entry')}: the checkpoint is damaged, or its files are of two runs"
                )
    verify_checkpoint(folder)  # after the other checks, which name what is wrong
    return tensors, values


def _describe(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return dtype and shape of each tensor."""
    return {name: f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for name, t in sorted(tensors.items())}


def load_tensors(where: Path, given: Mapping[str, Tensor], prefix: str, into: Mapping[str, Tensor]) -> None:
    """Copy `given[prefix + name]` into `into[name]` for every name; all must exist with the same shape and dtype."""
    with torch.no_grad():
        for name, tensor in into.items():
            value = given.get(prefix + name)
            if value is None:
                raise InputError(f"{where / TENSORS} has no {prefix + name}: it belongs to another model or program")
            if value.shape != tensor.shape or value.dtype != tensor.dtype:
                raise InputError(
                    f"{where / TENSORS}: {prefix + name} is {value.dtype} {list(value.shape)}, "
                    f"this run needs {tensor.dtype} {list(tensor.shape)}"
                )
            tensor.copy_(value)
