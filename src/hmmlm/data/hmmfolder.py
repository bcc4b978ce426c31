"""Reading the HMM of a model folder; everything in its files is checked."""

from __future__ import annotations

from pathlib import Path

import torch

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
from hmmlm.hmm import KINDS, HiddenMarkovModel


def load_hmm(path: Path) -> tuple[ModelFolder, HiddenMarkovModel]:
    """Return the content of a model folder, or of the best model of a training run there, and its HMM on the CPU."""
    model = load_model(path, LANGUAGE_MODEL)
    header, tensors = model.header, model.tensors
    config, file, kind = model.path / CONFIG, model.path / MODEL, str(header.get("model"))[:40]
    if kind not in KINDS:
        raise InputError(f"{config} has a model of kind {kind!r}; this hmmlm reads {', '.join(KINDS)}")
    states, words = (require_size(config, header, name) for name in ("states", "vocab_size"))
    try:
        needed, indices = KINDS[kind].layout(tensors)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    sizes = {"Z": states, "V": words}
    require_tensors(file, tensors, {name: [sizes.get(d) for d in dims] for name, dims in needed.items()})
    require_dtype(file, tensors, indices, torch.int64)
    require_dtype(file, tensors, [n for n in needed if n not in indices], torch.float32, torch.float64)
    try:
        hmm = KINDS[kind].from_tensors(tensors)
        if hmm.states != states:
            raise InputError(f"{hmm.states} states, {CONFIG} has {states}: files of two models are mixed")
        hmm.validate()
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    check_checksum(file, tensors)  # after the other checks, which name what is wrong
    return model, hmm
