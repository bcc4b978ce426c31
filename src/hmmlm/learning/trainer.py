"""Training a run from its configuration, or going on with one that was stopped.

A run is a folder: config.json, tokenizer/, data/ (token files), history.jsonl, tensorboard/, with a teacher
clusters.safetensors, and links into checkpoints/: last (to resume from), best (by validation) and final (language
models, for `hmmlm.load`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hmmlm.data.files import write_bytes
from hmmlm.errors import InputError
from hmmlm.learning.config import RunConfig, config_to_dict
from hmmlm.learning.config_checks import check_files
from hmmlm.learning.evaluate import perplexity
from hmmlm.learning.folders import CONFIG, new_run, refuse_shorter, refuse_used, saved_config
from hmmlm.learning.initialize import open_configured, open_network
from hmmlm.learning.interrupt import stop_on_signals
from hmmlm.learning.loop import Trainer, TrainingError, accelerator
from hmmlm.learning.prepare import find_data, prepare, reopen, with_real_tokenizer
from hmmlm.learning.progress import Progress

__all__ = ["CHANGEABLE", "TrainResult", "TrainingError", "saved_config", "train"]

CHANGEABLE = frozenset(
    {"data_folder", "train.epochs", "train.max_tokens", "train.device", "train.checkpoint_every", "train.tensorboard"}
)
"""Fields that may differ when a run is resumed."""


class TrainResult(NamedTuple):
    """How a run ended."""

    out: Path
    finished: bool
    """False if the user interrupted it; `message` then says how to resume."""
    message: str
    epochs: float
    steps: int
    tokens: int
    seconds: float
    best_perplexity: float
    """On the validation text, of the model in out/best; infinite before the first check."""


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Numbers below 1e-38 as zeros: CPUs take a hundred times as long for them, and nothing here depends on them.

    Threads do as the one that starts them: those of torch, which stay, if nothing was computed before.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@flushed_denormals()
def train(config: RunConfig, out: Path, resume: bool = False, progress: Progress | None = None) -> TrainResult:
    """Train in the folder `out`; with `resume`, go on from its last checkpoint.

    Ctrl-C or SIGTERM saves and returns a result that is not `finished`; a second one ends the process at once.
    """
    out, progress = Path(out), progress or Progress()
    config = with_real_tokenizer(config, saved_config(out) if resume else None)
    if resume:
        refuse_changes(saved_config(out), config, out)
    else:
        refuse_used(out)
    settings = (json.dumps(config_to_dict(config), indent=1) + "\n").encode()
    if (out / "last").exists():
        trainer = Trainer(config, out, reopen(out), progress)
        trainer.load()
        position, batch = trainer.position, config.batches.batch_size * config.batches.length
        refuse_shorter(out, position.epoch, position.tokens, trainer.total_tokens, batch)
        write_bytes(out / CONFIG, settings)
        progress.note(f"run folder: {out}")
    else:
        trainer = _start(config, out, settings, resume, progress)
    try:
        with stop_on_signals() as request:
            finished = trainer.run(request)
    except OSError as error:
        raise InputError(
            f"cannot write in {out}: {error.strerror or error}; the last checkpoint, {out / 'last'}, is whole: "
            f"make room and continue with --resume {out}"
        ) from error
    return _result(trainer, finished)


def _start(config: RunConfig, out: Path, settings: bytes, resume: bool, progress: Progress) -> Trainer:
    """A run at its beginning; `resume`: in a folder where it was begun before, but came to no checkpoint."""
    check_files(config)
    accelerator(config)
    teacher, network, source = open_configured(config), open_network(config), find_data(config)
    # Only now, when there is something to train on, does the run's folder come to be.
    with new_run(out, settings, begun=resume):
        progress.note(f"run folder: {out}")
        return Trainer(config, out, prepare(config, source, out, progress), progress, teacher, network)


def refuse_changes(saved: RunConfig, given: RunConfig, out: Path) -> None:
    """An InputError that names the first field in which a resumed run's configuration differs but may not."""
    before, now = _flat(config_to_dict(saved)), _flat(config_to_dict(given))
    for field, value in now.items():
        if field not in CHANGEABLE and before.get(field) != value:
            raise InputError(
                f"{field} is {value!r}, but the run in {out} has {before.get(field)!r}: leave it as it is, "
                f"or start a new run in another folder (may change: {', '.join(sorted(CHANGEABLE))})"
            )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _result(trainer: Trainer, finished: bool) -> TrainResult:
    position, out = trainer.position, trainer.out
    epochs = position.epoch + position.index / trainer.train_batches.steps_per_epoch
    if finished:
        message = f"finished after {position.step:,} steps; the best model is in {out / 'best'}"
    else:
        message = f"stopped at step {position.step:,}, saved; continue with: hmmlm train --resume {out}"
    best = perplexity(-trainer.plateau.best, 1)
    return TrainResult(out, finished, message, epochs, position.step, position.tokens, position.seconds, best)
