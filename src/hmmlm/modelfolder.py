"""The folder a model lies in: safetensors, a JSON header and the tokenizer's own file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hmmlm.data.tokenizer import Tokenizer
from hmmlm.errors import InputError

MODEL, CONFIG = "model.safetensors", "config.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def write_folder(
    folder: Path,
    tensors: dict[str, Tensor],
    header: dict[str, Any],
    metadata: dict[str, str],
    tokenizer: Tokenizer | None = None,
) -> None:
    """Everything is written beside its place first, then moved: a full disk changes nothing that was there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temporary:
            fresh = Path(temporary)
            if tokenizer is not None:
                tokenizer.save(fresh)
            (fresh / CONFIG).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
            save_file(tensors, fresh / MODEL, metadata=metadata)
            for file in fresh.iterdir():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            stale = [name for name in _TOKENIZER_FILES if tokenizer is not None and not (fresh / name).exists()]
            for file in sorted(fresh.iterdir()):
                os.replace(file, folder / file.name)
            for name in stale:
                (folder / name).unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot save to {folder}: {reason}; what was there before is kept") from error


def model_folder(path: Path) -> Path:
    """`path` itself if a model lies there, its best model if it is a training run."""
    if not path.exists():
        raise InputError(f"no model at {path}: there is no such folder")
    if not path.is_dir():
        raise InputError(f"{path} is a file, a model is a folder with {MODEL} and {CONFIG}: give the folder")
    for folder in (path, path / "best"):
        if (folder / MODEL).exists():
            return folder
    if (path / "history.jsonl").exists():
        raise InputError(f"the training run {path} has no model yet: its first validation check writes one")
    raise InputError(f"no model in {path}: it should hold {MODEL} and {CONFIG}, or be the folder of a training run")


def read_tensors(path: Path, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The named tensors and the metadata of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            missing = [name for name in names if name not in present]
            if missing:
                raise InputError(f"{path} has no {missing[0]}: it is of another kind of model")
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InputError(f"{path} is missing, truncated or not safetensors ({reason}): save it again") from None
