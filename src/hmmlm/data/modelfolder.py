"""Model folders, for every kind of model: safetensors, a JSON header and the tokenizer's file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from hmmlm.arguments import describe
from hmmlm.data.files import is_integer, read_json, replace_all
from hmmlm.data.tensorfiles import CHECKSUM, check_checksum, checksum, read_tensors, write_tensors
from hmmlm.data.tokenizers import EOS_FILE, Tokenizer, load_tokenizer
from hmmlm.errors import InputError
from hmmlm.numerics.distributions import check_finite

MODEL, CONFIG = "model.safetensors", "config.json"
VERSIONS = {"hmmlm language model": (2, 1)}
"""The versions of a format that this package reads, the first of which it writes; (1,) of others."""
LANGUAGE_MODEL = "hmmlm language model"
"""The format of an HMM with its tokenizer."""
MIXTURE = "hmmlm mixture"
"""That of an interpolation of models, whose parts are in folders named 0, 1, …"""
COMMANDS = {
    LANGUAGE_MODEL: "hmmlm train",
    "hmmlm teacher": "hmmlm teacher",
    "hmmlm baseline": "hmmlm baseline",
    MIXTURE: "hmmlm mix",
}
"""The formats of model folders, and the commands that write them."""
NO_HMM = (
    "a mixture is not an HMM; give one of its HMMs, which are in its folders 0, 1, …, or use `hmmlm eval`, `score`, "
    "`sample` or `compare`"
)
AnyNetwork = TypeVar("AnyNetwork", bound=nn.Module)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", EOS_FILE)


def as_folder(path: str | Path) -> Path:
    """Return the path of a model's folder; raise an InputError for anything else."""
    if not isinstance(path, str | Path):
        raise InputError(f"a model is a folder, not {describe(path)}: give its path")
    if not str(path) or "\0" in str(path):
        raise InputError(f"{describe(str(path))} is no path: give that of the model's folder")
    return Path(path)


class ModelFolder(NamedTuple):
    """The content of a model's folder."""

    path: Path
    header: dict[str, Any]
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer


def save_model(
    folder: Path, kind: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor], tokenizer: Tokenizer
) -> None:
    """Write a model in the format `kind`, such as "hmmlm teacher". A failure leaves an existing model unchanged."""
    fingerprint = tokenizer.fingerprint()
    content = {"format": kind, "version": VERSIONS.get(kind, (1,))[0], **header, "tokenizer": fingerprint}
    metadata = {"format": kind, "tokenizer": fingerprint, CHECKSUM: checksum(tensors)}
    write_folder(folder, tensors, content, metadata, tokenizer)


def load_model(path: Path, kind: str, weights: bool = True) -> ModelFolder:
    """Read the model in the folder `path`, or the best model of the training run there.

    Without `weights` no tensors are read: they need not exist, and `path` is the model's own folder.
    """
    folder = find_model(path) if weights else path
    header = read_json(folder / CONFIG)
    found = header.get("format")
    if found != kind and isinstance(found, str) and found in COMMANDS:
        advice = f": {NO_HMM}" if (found, kind) == (MIXTURE, LANGUAGE_MODEL) else ""
        raise InputError(f"{path} is a model of `{COMMANDS[found]}`, not of `{COMMANDS[kind]}`{advice}")
    if found != kind:
        raise InputError(f"{folder / CONFIG} does not belong to a model of `{COMMANDS[kind]}`")
    known = VERSIONS.get(kind, (1,))
    if not any(is_integer(header.get("version"), version) for version in known):
        versions = " and ".join(map(str, sorted(known)))
        raise InputError(f"{folder / CONFIG} has version {header.get('version')!r}; this hmmlm reads {versions}")
    tensors, metadata = read_tensors(folder / MODEL) if weights else ({}, {})
    tokenizer = load_tokenizer(folder)
    fingerprint = tokenizer.fingerprint()
    trained_with = header.get("tokenizer", header.get("fingerprint"))
    if fingerprint != trained_with or fingerprint != metadata.get("tokenizer", trained_with):
        raise InputError(
            f"{folder}: the tokenizer's vocabulary ({tokenizer.vocab_size} tokens, {fingerprint}) is not the one the "
            f"model was trained with ({trained_with}): restore that tokenizer's file"
        )
    return ModelFolder(folder, header, tensors, tokenizer)


def find_model(path: Path) -> Path:
    """Return `path` itself if it contains a model, or its best model if it is a training run."""
    if not path.exists():
        raise InputError(f"no model at {path}: the folder does not exist")
    if not path.is_dir():
        raise InputError(f"{path} is a file, but a model is a folder with {MODEL} and {CONFIG}: give the folder")
    for folder in (path, path / "best"):
        if (folder / MODEL).exists():
            return folder
    if (path / "history.jsonl").exists():
        raise InputError(f"the training run {path} has no model yet: its first validation check writes one")
    raise InputError(f"no model in {path}: it should contain {MODEL} and {CONFIG}, or be the folder of a training run")


def write_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    header: Mapping[str, Any],
    metadata: dict[str, str],
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write the files of a model to a temporary folder, then move them: a full disk leaves existing files unchanged."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temporary:
            fresh = Path(temporary)
            if tokenizer is not None:
                tokenizer.save(fresh)
            (fresh / CONFIG).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
            write_tensors(fresh / MODEL, tensors, metadata)
            files = sorted(fresh.iterdir())
            for file in files:
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            stale = [name for name in TOKENIZER_FILES if tokenizer is not None and not (fresh / name).exists()]
            replace_all(files, [folder / file.name for file in files])
            for name in stale:
                (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot save to {folder}: {error.strerror or error}; existing files are kept") from error


def require_tensors(path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int | None]]) -> None:
    """Raise an InputError unless tensors with these names and shapes exist; None matches any size."""
    for name, shape in shapes.items():
        if name not in tensors:
            raise InputError(f"{path} has no {name}: it belongs to another kind of model")
        found = list(tensors[name].shape)
        if len(found) != len(shape) or any(want not in (None, have) for want, have in zip(shape, found, strict=True)):
            wanted = ["?" if size is None else size for size in shape]
            raise InputError(f"{path}: {name} has shape {found}, {CONFIG} has {wanted}: files of two models are mixed")


def require_dtype(path: Path, tensors: Mapping[str, Tensor], names: Sequence[str], *dtypes: torch.dtype) -> None:
    """Raise an InputError unless the tensors `names` have one of these dtypes, and all the same."""
    for name in names:
        found, first = tensors[name].dtype, tensors[names[0]].dtype
        if found not in dtypes:
            raise InputError(
                f"{path}: {name} is {_short(found)}, not {' or '.join(map(_short, dtypes))}: save it again"
            )
        if found != first:
            raise InputError(f"{path}: {name} is {_short(found)}, but {names[0]} is {_short(first)}: save it again")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require_size(path: Path, header: Mapping[str, Any], name: str) -> int:
    """Return the size `name` in the header of the model file `path`; raise an InputError unless it is one."""
    value = header.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{path}: {name} is {value!r:.40}, not an integer of at least 1: save the model again")
    return value


def load_network(build: Callable[[], AnyNetwork], layers: int, path: Path, tensors: Mapping[str, Tensor]) -> AnyNetwork:
    """Return the network that `build` creates, with the tensors of the file `path`, which must fit and be finite."""
    if layers > len(tensors):
        raise InputError(f"{path} has {len(tensors)} tensors, too few for the {layers} layers of {CONFIG}")
    try:
        with torch.device("meta"):  # sizes that the file does not have are found without allocating them
            weights = build().state_dict()
    except RuntimeError:
        raise InputError(f"{path} does not have the sizes of {CONFIG}, which are too large for any file") from None
    require_tensors(path, tensors, {name: weight.shape for name, weight in weights.items()})
    unknown = sorted(tensors.keys() - weights.keys())
    if unknown:
        raise InputError(f"{path}: {CONFIG} has no place for {unknown[0]}: files of two models are mixed")
    for name, weight in weights.items():
        require_dtype(path, tensors, [name], weight.dtype)
        check_finite(tensors[name], f"{path}: {name}")
    check_checksum(path, tensors)
    network = build()
    network.load_state_dict(tensors)
    return network
