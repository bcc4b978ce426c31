"""What every training shares: a run is prepared in its folder, or opened to resume, and trained there.

A run is a folder: config.json, tokenizer/, data/ (token files), history.jsonl, tensorboard/, with blocks blocks.json,
with a teacher clusters.safetensors, and links into checkpoints/: last (to resume from), previous (the one before),
best (by validation) and final (models for use).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hmmlm.config.networks import BaselineConfig, TeacherConfig
from hmmlm.config.run import RunConfig
from hmmlm.config.training import TrainingConfig
from hmmlm.data.batches import own_share
from hmmlm.data.files import write_bytes
from hmmlm.data.tokenfile import unknown_fraction
from hmmlm.device import device_name, keep_freed_memory, pick_device
from hmmlm.distillation.labels import LABELS
from hmmlm.distributed.ranks import LostRankError, connected, world
from hmmlm.errors import InputError
from hmmlm.learning.checkpoints import Checkpoints
from hmmlm.learning.fit import Fit, Phase
from hmmlm.learning.learners import Learner, count_parameters
from hmmlm.lm.scoring import perplexity
from hmmlm.runs.folders import (
    CONFIG,
    lock_run,
    new_run,
    refuse_changes,
    refuse_lost,
    refuse_shorter,
    refuse_used,
    saved_config,
)
from hmmlm.runs.history import History, NoHistory
from hmmlm.runs.interrupt import StopRequest, stop_on_signals
from hmmlm.runs.loggers import Logger
from hmmlm.runs.progress import Progress
from hmmlm.terminal import counted
from hmmlm.training.prepare import (
    Prepared,
    check_batch_size,
    check_data,
    check_memory,
    find_data,
    make_batches,
    prepare,
    reopen,
    text_digests,
    with_actual_text,
    write_labels,
)

if TYPE_CHECKING:
    from lightning_fabric import Fabric


AnyRunConfig = RunConfig | TeacherConfig | BaselineConfig


class TrainResult(NamedTuple):
    """How a run ended."""

    out: Path
    finished: bool
    """False if the user interrupted it."""
    epochs: float
    steps: int
    tokens: int
    seconds: float
    best_perplexity: float
    """On the validation text, of the model in out/best; infinite before the first check."""


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Treat numbers below 1e-38 as zeros: CPUs take a hundred times as long for them, and nothing depends on them.

    Threads inherit this from the one that starts them: torch's threads, which stay, if nothing was computed before.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class Trainer(ABC):
    """Prepares the folder of a run, or opens it to resume, and trains there; subclasses know what is trained."""

    data: Prepared
    fit: Fit

    def __init__(
        self, config: AnyRunConfig, out: Path, resume: bool, progress: Progress | None, loggers: Sequence[Logger] = ()
    ) -> None:
        self.config: AnyRunConfig = with_actual_text(config, saved_config(type(config), out) if resume else None)
        self.out, self.resume, self.progress, self.loggers = out, resume, progress or Progress(), loggers
        self.settings = (json.dumps(self.config.dump(), indent=1) + "\n").encode()
        self.device = pick_device(config.train.device)

    @abstractmethod
    def check(self) -> None:
        """Raise the errors that can be found before anything is written."""

    def complete(self, data: Prepared) -> Prepared:
        """Return the prepared text with whatever else training reads."""
        return data

    @abstractmethod
    def make_learner(self, fabric: Fabric, data: Prepared) -> Learner[Any]:
        """Create the learner, with the parameters that training starts from."""

    @abstractmethod
    def plan(self, request: StopRequest) -> Sequence[Phase]:
        """Return the phases of the run, after whatever has to be computed before them."""

    def run(self) -> TrainResult:
        """Train to the end. Of several processes, rank 0 prepares the folder while the others wait; then all train."""
        out, devices = self.out, self.config.train.devices
        with connected(self.device.type == "cuda") as ranks, ExitStack() as stack:
            if ranks.count == 1 and devices > 1:
                raise InputError(
                    f"train.devices is {devices}, but this is one process: use the command `hmmlm "
                    f"{self.config.command}`, or start the program with torchrun --nproc-per-node {devices}"
                )
            saved = ranks.on_first(lambda: self.open_folder(stack))
            if not ranks.first:
                self.progress = Progress()
                data = reopen(out)
                self.complete(data)
                self.make_fit(data)
            if saved:
                self.load()
            fit = self.fit
            try:
                with stop_on_signals() as request, self.open_history() as history:
                    finished = fit.run(lambda: self.plan(request), request, history)
            except LostRankError as error:
                raise LostRankError(
                    f"{error}; the last checkpoint, {out / 'last'}, is intact: continue with --resume {out}"
                ) from None
            except BrokenPipeError:  # of standard output: nobody reads the progress
                raise
            except OSError as error:
                raise InputError(
                    f"cannot write in {out}: {error.strerror or error}; the last checkpoint, {out / 'last'}, is "
                    f"intact: make room and continue with --resume {out}"
                ) from error
        position = fit.position
        epochs = position.epoch + position.index / fit.train.steps_per_epoch
        best = perplexity(-fit.plateau.best, 1)
        return TrainResult(out, finished, epochs, position.step, position.tokens, position.seconds, best)

    def open_folder(self, stack: ExitStack) -> bool:
        """Prepare the folder, locked until `stack` closes; return whether it has a checkpoint to load."""
        config, out = self.config, self.out
        check_batch_size(config.batches, world().count)
        if self.resume:
            stack.enter_context(lock_run(out))
            refuse_changes(saved_config(type(config), out), config, out)
            if (out / "last").exists():
                self.make_fit(reopen(out))
                return True
            refuse_lost(out, config.command)
        else:
            refuse_used(out)
        check_data(config)
        check_memory(config.model.size(1), config.optimizer.kind, self.device)  # whatever the vocabulary will be
        self.check()
        source = find_data(config)
        if not self.resume:
            stack.enter_context(lock_run(out))
        with new_run(out, self.settings, begun=self.resume):
            self.progress.note(f"run folder: {out}")
            before = text_digests(out)
            data = self.complete(prepare(config, source, out, self.progress))
            if isinstance(self.config, RunConfig) and self.config.labels and not isinstance(source, Path):
                write_labels(source["train"], data.tokenizer, self.config.model.num_states, out / LABELS)
            self.make_fit(data)
        if before.items() - text_digests(out).items():
            self.progress.note(f"{config.data} has changed since this run was started: the present text is used")
        return False

    def make_fit(self, data: Prepared) -> None:
        """Create the training loop on prepared data."""
        config = self.config
        check_memory(config.model.size(data.tokenizer.vocab_size), config.optimizer.kind, self.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        train, valid = (make_batches(config, data, split, own_share()) for split in ("train", "valid"))
        learner = self.make_learner(make_fabric(config), data)
        self.progress.note(describe(learner, data))
        checkpoints = Checkpoints(config, self.out, learner, data.tokenizer)
        self.data, self.fit = data, Fit(train, valid, checkpoints, self.progress)

    def open_history(self) -> History | NoHistory:
        if not world().first:
            return NoHistory()
        step = self.fit.checkpoints.saved.step
        return History(self.out, step, self.config.train.tensorboard, self.loggers, self.config.dump())

    def load(self) -> None:
        """Load the checkpoint of the run."""
        fit, out, batches = self.fit, self.out, self.config.batches
        fit.checkpoints.load(fit)
        batch = batches.batch_size * batches.length
        refuse_shorter(out, fit.position.epoch, fit.position.tokens, fit.total_tokens, batch)
        if world().first:
            write_bytes(out / CONFIG, self.settings)
        self.progress.note(f"run folder: {out}")
        if fit.position.tokens >= fit.total_tokens:
            done = counted(fit.position.epoch, "epoch")
            self.progress.note(f"this run is complete ({done}): --train.epochs N trains it longer")


def describe(learner: Learner[Any], data: Prepared) -> str:
    """Return the line with device, parameters and text of a run."""
    parameters = count_parameters(learner)
    train, tokenizer = data.tokens["train"], data.tokenizer
    unknown = unknown_fraction(train, tokenizer.unk_id, tokenizer.eos_id)
    return (
        f"device {device_name(learner.device)}; {parameters:,} parameters; vocabulary {tokenizer.vocab_size:,}; "
        f"{counted(len(train), 'training token')}, {unknown:.1%} unknown words"
    )


def make_fabric(config: TrainingConfig) -> Fabric:
    """Return Fabric for the configured device and precision; every process has one device."""
    from lightning_fabric import Fabric  # loads torch._dynamo, which takes as long as torch

    device, ranks = pick_device(config.train.device), world()
    if ranks.count == 1:
        return Fabric(accelerator=device.type, devices=1, precision=config.train.precision)
    # Processes share the CPU, and GPUs if there are fewer of these.
    devices = [ranks.local % torch.cuda.device_count()] if device.type == "cuda" else 1
    return Fabric(accelerator=device.type, devices=devices, precision=config.train.precision)
