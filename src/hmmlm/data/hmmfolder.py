"""Reading the HMM of a model folder; everything in its files is checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hmmlm.data.modelfolder import (
    CONFIG,
    LANGUAGE_MODEL,
    MODEL,
    ModelFolder,
    load_model,
    require_dtype,
    require_size,
    require_tensors,
)
from hmmlm.data.tensorfiles import check_checksum
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.scan.composition import layout, read_parts


def load_hmm(path: Path) -> tuple[ModelFolder, HMM]:
    """Return the content of a model folder, or of the best model of a training run there, and its HMM on the CPU."""
    model = load_model(path, LANGUAGE_MODEL)
    header, config, file = model.header, model.path / CONFIG, model.path / MODEL
    states, words = (require_size(config, header, name) for name in ("states", "vocab_size"))
    kinds = {name: str(kind)[:40] for name, kind in header.items() if name.endswith("kind")}
    tensors = model.tensors
    try:
        if header["version"] == 1:
            kinds, tensors = upgrade(str(header.get("model"))[:40], tensors)
        needed, indices = layout(kinds)
    except InputError as error:
        raise InputError(f"{config}: {error}") from None
    sizes = {"states": states, "words": words}
    require_tensors(file, tensors, {name: [sizes.get(d) for d in dims] for name, dims in needed.items()})
    require_dtype(file, tensors, indices, torch.int64)
    require_dtype(file, tensors, [n for n in needed if n not in indices], torch.float32, torch.float64)
    try:
        hmm = HMM(*read_parts(tensors, kinds))
        if hmm.num_states != states:
            raise InputError(f"{hmm.num_states} states, {CONFIG} has {states}: files of two models are mixed")
        hmm.validate()
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    check_checksum(file, model.tensors)  # after the other checks, which name what is wrong
    return model, hmm


# --- files of hmmlm 0.2 ---

_OLD = {
    "dense": {"log_transition": "transition.log_probs", "log_emission": "emission.log_probs"},
    "blocked": {
        "u": "transition.u",
        "w": "transition.w",
        "log_normalizer": "transition.log_normalizer",
        "block_of_word": "emission.block_of_word",
        "log_emission": "emission.log_probs",
    },
}
"""The tensors of each kind, and their names today."""
_KINDS = {"dense": ("dense", "categorical"), "blocked": ("factored", "blocked")}
_COMPONENT = re.compile(r"components\.(\d{1,4})\.([a-z]+)\.(\w+)")


def upgrade(kind: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the kinds and tensors of a model that hmmlm 0.2 wrote, by their names of today."""
    if kind != "union":
        if kind not in _OLD:
            raise InputError(f"a model of kind {kind!r}; this hmmlm reads {', '.join(_OLD)} and union")
        transition, emission = _KINDS[kind]
        return (
            {"transition.kind": transition, "emission.kind": emission},
            {_OLD[kind].get(name, name): value for name, value in tensors.items()},
        )
    found = {match.groups() for name in tensors if (match := _COMPONENT.fullmatch(name))}
    parts = sorted({(int(number), own) for number, own, _ in found})
    if [number for number, _ in parts] != list(range(len(parts))) or not parts:
        raise InputError("the components are not numbered 0, 1, …: files of two models are mixed")
    kinds, renamed, starts = {"transition.kind": "union", "emission.kind": "union"}, dict[str, Tensor](), []
    weights = tensors.get("log_weights")
    if weights is None or weights.shape != (len(parts),):
        raise InputError(f"log_weights must have shape [{len(parts)}], one per component")
    for number, own in parts:
        prefix = f"components.{number}.{own}."
        inner = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        own_kinds, own_tensors = upgrade(own, inner)
        kinds |= {name.replace(".", f".{number}."): each for name, each in own_kinds.items()}
        renamed |= {name.replace(".", f".{number}."): value for name, value in own_tensors.items()}
        if renamed.pop("log_start", None) is None:
            raise InputError(f"component {number} has no log_start: files of two models are mixed")
        start = own_tensors["log_start"]
        if start.dim() != 1 or start.dtype != weights.dtype:
            raise InputError(f"log_start of component {number} must have shape [states] and the dtype of log_weights")
        starts.append(weights[number] + start)
    return kinds, {"log_start": torch.cat(starts), **renamed}
