"""Checkpoints that a kill at any moment leaves whole: safetensors and JSON, no pickle.

A folder cannot be replaced atomically, a symbolic link can. So `RUN/last` and `RUN/best` are relative links into
`RUN/checkpoints/`, and saving goes: write everything into a hidden folder there and fsync it; rename it to its final
name; make a new link under a temporary name and rename that over the old one (the atomic moment); then delete what no
link points to. Killed before the atomic moment, the old checkpoint stands; after it, the new one. Leftovers of a kill
are removed by the next save. If the disk is full, the hidden folder is removed and the old checkpoint stands.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hmmlm.data.files import read_json
from hmmlm.errors import InputError

FORMAT = "hmmlm checkpoint"
VERSION = 1
TENSORS = "state.safetensors"
STATE = "state.json"


@dataclass
class Position:
    """How far a run is: what a checkpoint keeps as JSON."""

    epoch: int = 0
    index: int = 0
    """Batches done in this epoch."""
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def save_folder(run: Path, link: str, name: str, write: Callable[[Path], None]) -> None:
    """Make `run/link` point to a new folder `run/checkpoints/name` that `write` fills: wholly, or not at all."""
    store = run / "checkpoints"
    final = store / name
    while final.exists():  # this step was saved before; what a link points to is never touched
        final = final.with_name(final.name + "+")
    partial = store / f".{final.name}.partial"
    try:
        store.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write(partial)
        for path in (*partial.rglob("*"), partial):
            _fsync(path)
        os.rename(partial, final)
        _fsync(store)
        _replace_link(run / link, final)
        _fsync(run)
    except (OSError, SafetensorError, InputError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        kept = f"the checkpoint before it, {run / link}, is whole" if (run / link).exists() else "there was none before"
        raise InputError(
            f"cannot save {final}: {reason}; {kept}: make room and continue with --resume {run}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _remove_unlinked(store)


def remove_folder(run: Path, link: str) -> None:
    """Take the link `run/link` away, if it is there, and what it points to."""
    (run / link).unlink(missing_ok=True)
    if (run / "checkpoints").exists():
        _remove_unlinked(run / "checkpoints")


def _replace_link(link: Path, target: Path) -> None:
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    if link.is_dir() and not link.is_symlink():  # a copy of the run that followed its links
        os.rename(link, target.with_name(f".{link.name}.unpacked"))
    os.replace(fresh, link)


def _remove_unlinked(store: Path) -> None:
    kept = {path.resolve() for path in store.parent.iterdir() if path.is_symlink()}
    for path in store.iterdir():
        if path.resolve() not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_state(folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """The two files of a checkpoint to resume from."""
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / TENSORS)
    content = {"format": FORMAT, "version": VERSION, **state}
    (folder / STATE).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (on the CPU) and scalars of a checkpoint; an InputError names a file that is missing, cut or foreign."""
    state = read_json(folder / STATE)
    if state.get("format") != FORMAT:
        raise InputError(f"{folder / STATE} is not the state of a training run: it may be of another program")
    if state.get("version") != VERSION:
        raise InputError(f"{folder / STATE} has version {state.get('version')!r}; this hmmlm reads {VERSION}")
    try:
        with safe_open(folder / TENSORS, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder / TENSORS} is missing, truncated or not a safetensors file: {error}") from None


def load_tensors(where: Path, given: Mapping[str, Tensor], prefix: str, into: Mapping[str, Tensor]) -> None:
    """Copy `given[prefix + name]` into `into[name]`, which all have to be there in the same shapes."""
    with torch.no_grad():
        for name, tensor in into.items():
            value = given.get(prefix + name)
            if value is None:
                raise InputError(f"{where / TENSORS} has no {prefix + name}: it is of another model or program")
            if value.shape != tensor.shape or value.dtype != tensor.dtype:
                raise InputError(
                    f"{where / TENSORS}: {prefix + name} is {value.dtype} {list(value.shape)}, "
                    f"this run needs {tensor.dtype} {list(tensor.shape)}"
                )
            tensor.copy_(value)
