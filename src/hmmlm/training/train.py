"""Training from a configuration, or resuming a run: hidden Markov models, teachers and baselines.

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
from torch import Tensor

from hmmlm.config.defaults import complete
from hmmlm.config.initialization import BigramConfig, LabelConfig, LvdConfig
from hmmlm.config.networks import BaselineConfig, TeacherConfig
from hmmlm.config.run import RunConfig
from hmmlm.config.sections import BaumWelchConfig
from hmmlm.config.training import TrainingConfig
from hmmlm.data.batches import Batches, own_share
from hmmlm.data.files import PERPLEXITY, write_bytes
from hmmlm.data.tokenfile import unknown_fraction
from hmmlm.device import device_name, keep_freed_memory, pick_device
from hmmlm.distillation.labels import LABELS, GivenLabels, LabeledBatches
from hmmlm.distillation.next_words import NEXT_WORDS, NextWordBatches
from hmmlm.distributed.ranks import LostRankError, connected, world
from hmmlm.errors import InputError
from hmmlm.hmm import Carry
from hmmlm.learning.bigram_start import assign_bigram
from hmmlm.learning.checkpoints import Checkpoints
from hmmlm.learning.fit import Fit, Phase, TrainingError
from hmmlm.learning.fused_adamw import fuse
from hmmlm.learning.learners import (
    AdamWLearner,
    BaumWelchLearner,
    HmmLearner,
    Learner,
    NetworkLearner,
    count_parameters,
)
from hmmlm.lm.scoring import perplexity
from hmmlm.models.base import Model
from hmmlm.models.scalar import BlockedScalar
from hmmlm.restarts import best_of
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
from hmmlm.teachers.teacher import Teacher
from hmmlm.terminal import counted
from hmmlm.training.prepare import (
    Prepared,
    add_blocks,
    check_batch_size,
    check_data,
    check_memory,
    find_data,
    make_batches,
    prepare,
    reopen,
    text_digests,
    text_size,
    with_actual_text,
    write_labels,
)
from hmmlm.training.warm_start import (
    WarmStart,
    check_start,
    check_teacher,
    draw_next_words,
    freeze_embeddings,
    joint_tokens,
    open_label_teacher,
)

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["TrainResult", "TrainingError", "train", "train_baseline", "train_teacher"]

TRIALS, TRIAL_EPOCHS = 8, 4
"""A start is tried for 1 / TRIALS of the run: one epoch at least, TRIAL_EPOCHS at most."""

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


@flush_denormals()
def train(
    config: RunConfig, out: Path, resume: bool = False, progress: Progress | None = None, loggers: Sequence[Logger] = ()
) -> TrainResult:
    """Train a hidden Markov model in the folder `out`; with `resume`, continue from its last checkpoint.

    Ctrl-C or SIGTERM saves and returns a result that is not `finished`; a second one ends the process at once.
    """
    return HmmTrainer(config, Path(out), resume, progress, loggers).run()


def make_learner(config: RunConfig, fabric: Fabric, data: Prepared) -> HmmLearner:
    """Return the model of a run with its optimizer."""
    seed = config.train.seed
    torch.manual_seed(seed)
    model = config.model.build(data.tokenizer, data.block_of_word, seed, fabric.device)
    if isinstance(config.optimizer, BaumWelchConfig):
        return BaumWelchLearner(fabric, model, data.tokenizer, config.dump(), config.optimizer)
    return AdamWLearner(fabric, model, data.tokenizer, config.dump(), config.optimizer, config.next_words.weight)


def train_teacher(
    config: TeacherConfig, out: Path, resume: bool = False, progress: Progress | None = None
) -> TrainResult:
    """Train a teacher in the folder `out`, which `open_teacher` then accepts; see `train`."""
    return NetworkTrainer(config, Path(out), resume, progress).run()


def train_baseline(
    config: BaselineConfig, out: Path, resume: bool = False, progress: Progress | None = None
) -> TrainResult:
    """Train a neural baseline in the folder `out`; see `train`.

    At the end the best model by validation is scored once, on valid and test, into perplexity.json.
    """
    out = Path(out)
    result = NetworkTrainer(config, out, resume, progress).run()
    if result.finished and world().first:
        scores = {split: score_baseline(out, split) for split in ("valid", "test")}
        write_bytes(out / PERPLEXITY, (json.dumps(scores, indent=1) + "\n").encode())
    return result


def score_baseline(run: Path, split: str) -> float:
    """Return the perplexity of a run's best model: every token counts, each predicted from what precedes it."""
    from hmmlm.baselines.neural import load_baseline

    config = saved_config(BaselineConfig, run)
    data = reopen(run)
    network, tokenizer = load_baseline(run / "best")
    learner = NetworkLearner(make_fabric(config), network, tokenizer, config.optimizer)
    return learner.evaluate(make_batches(config, data, split).epoch(0), lambda tokens: None).perplexity


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


class HmmTrainer(Trainer):
    """Trains a hidden Markov model, with a teacher's labels or next words if there is one."""

    config: RunConfig
    model: Model
    teacher: Teacher | None = None
    """Of labels; opened before anything is written, until the plan needs it."""

    def check(self) -> None:
        config = self.config
        config.model.check_files()
        clusters = config.initialization.clusters if isinstance(config.initialization, LabelConfig) else None
        if clusters is not None and not clusters.is_file():
            raise InputError(f"initialization.clusters: no file {clusters}; runs with a teacher write one")
        network = config.next_words.teacher
        if network is not None and not network.is_dir():
            raise InputError(f"next_words.teacher: no folder {network}; `hmmlm baseline` trains one")
        self.teacher = open_label_teacher(config)

    def complete(self, data: Prepared) -> Prepared:
        """Choose the settings that the user left open, now that the text is known, and make word blocks."""
        self.config, line = complete(self.config, text_size(data))
        if not world().first:
            return data
        if line:
            self.progress.note(line)
            self.settings = (json.dumps(self.config.dump(), indent=1) + "\n").encode()
            write_bytes(self.out / CONFIG, self.settings)
        return add_blocks(self.config, data, self.out, self.progress)

    def make_learner(self, fabric: Fabric, data: Prepared) -> Learner[Carry]:
        config = self.config
        if not (self.out / NEXT_WORDS).exists():  # drawn words are stored, and the teacher may be gone
            check_teacher(config, data.tokenizer)
        learner = make_learner(config, fabric, data)
        if isinstance(config.initialization, LabelConfig) and self.teacher is not None:  # of a new run
            check_start(config.initialization, learner.model, len(data.tokens["train"]), self.teacher)
        self.model = learner.model
        return fuse(learner)

    def plan(self, request: StopRequest) -> Sequence[Phase]:
        """Return the phases: P(O, S) with labels from a teacher, if there is one, then P(O)."""
        config, fit, model, data, on_work = self.config, self.fit, self.model, self.data, request.raise_if_alone
        start, position, total = config.initialization, fit.position, fit.total_tokens
        if config.labels is not None:
            return [Phase("joint", total, LabeledBatches(fit.train, GivenLabels.open(self.out / LABELS)))]
        marginal: Batches = fit.train
        if config.next_words.teacher is not None:
            words = draw_next_words(config, self.out, data, fit.learner.device, self.progress, on_work)
            marginal = NextWordBatches(fit.train, words, config.next_words.samples, config.train.seed, own_share())
        if not isinstance(start, LabelConfig):
            fit.starts_trained = isinstance(start, BigramConfig)
            if position.step == 0 and not position.initialized:
                self.start(request)
            return [Phase("marginal", total, marginal)]
        warm: WarmStart | None = None
        labeled: LabeledBatches | None = None
        if not position.initialized or position.tokens < position.joint_tokens:
            teacher, self.teacher = self.teacher, None
            warm = WarmStart(config, self.out, data, model, teacher, self.progress, on_work)
            source = warm.open_labels(fresh=fit.checkpoints.saved.step < 0)
            labeled = LabeledBatches(fit.train, source)
            if not position.initialized:
                warm.initialize(source)
                position.initialized, position.joint_tokens = True, joint_tokens(config, total)
                fit.save()
        frozen_tokens = start.frozen_tokens if isinstance(start, LvdConfig) else 0
        edges = sorted({min(edge, total) for edge in (position.joint_tokens, frozen_tokens, total)} - {0})

        def enter(frozen: bool, joint: bool) -> None:
            freeze_embeddings(model, start, frozen)
            fit.learner.reset_graph()
            if warm is not None and not joint:
                warm.release_teacher()

        phases = []
        for begin, end in zip([0, *edges], edges, strict=False):
            joint = begin < position.joint_tokens and labeled is not None
            name, batches = ("joint", labeled) if joint else ("marginal", marginal)
            frozen = begin < frozen_tokens
            phases.append(Phase(name, end, batches, lambda frozen=frozen, joint=joint: enter(frozen, joint)))  # type: ignore[misc, arg-type]
        return phases

    def start(self, request: StopRequest) -> None:
        """Set the parameters of a new run to those of a bigram, or to the best of several starts."""
        config, fit, data, seed = self.config, self.fit, self.data, self.config.train.seed
        if isinstance(config.initialization, BigramConfig):
            assert isinstance(self.model, BlockedScalar)  # the configuration was validated
            resets = config.batches.kind == "stream" and config.batches.reset_at_eos
            assign_bigram(self.model, data.tokens["train"], data.tokenizer.eos_id, resets, seed)
        elif config.train.restarts > 1:
            epoch = fit.train.tokens_per_epoch
            total = min(max(epoch, fit.total_tokens // TRIALS), TRIAL_EPOCHS * epoch)

            def attempt(seed: int) -> tuple[float, dict[str, Tensor]]:
                own = config.model_copy(update={"train": config.train.model_copy(update={"seed": seed})})
                learner = fuse(make_learner(own, make_fabric(config), data))
                loss = fit.try_out(learner, total, request)
                self.progress.note(f"start with seed {seed}: valid perplexity {perplexity(-loss, 1):.2f}")
                return loss, learner.parameters()

            _, best = best_of(attempt, lambda found: -found[0], config.train.restarts, seed)
            with torch.no_grad():
                for name, parameter in fit.learner.parameters().items():
                    parameter.copy_(best[name])
        else:
            return
        fit.position.initialized = True


class NetworkTrainer(Trainer):
    """Trains a neural language model: a teacher or a baseline."""

    config: TeacherConfig | BaselineConfig

    def check(self) -> None:
        """Networks need nothing but the text."""

    def make_learner(self, fabric: Fabric, data: Prepared) -> NetworkLearner[Any]:
        config = self.config
        torch.manual_seed(config.train.seed)
        generator = torch.Generator().manual_seed(config.train.seed)
        network = config.model.build(data.tokenizer, config.batches.length, generator)
        return NetworkLearner(fabric, network, data.tokenizer, config.optimizer)

    def plan(self, request: StopRequest) -> Sequence[Phase]:
        return [Phase("marginal", self.fit.total_tokens, self.fit.train)]


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
