"""Training of hidden Markov models from a configuration, or from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hmmlm.config.defaults import complete
from hmmlm.config.initialization import BigramConfig, LabelConfig, LvdConfig
from hmmlm.config.run import RunConfig
from hmmlm.config.sections import BaumWelchConfig
from hmmlm.data.batches import Batches, own_share
from hmmlm.data.files import write_bytes
from hmmlm.distillation.labels import LABELS, GivenLabels, LabeledBatches
from hmmlm.distillation.next_words import NEXT_WORDS, NextWordBatches
from hmmlm.distributed.ranks import world
from hmmlm.errors import InputError
from hmmlm.hmm import Carry
from hmmlm.learning.bigram_start import assign_bigram
from hmmlm.learning.fit import Phase
from hmmlm.learning.fused_adamw import fuse
from hmmlm.learning.learners import AdamWLearner, BaumWelchLearner, HmmLearner, Learner
from hmmlm.lm.scoring import perplexity
from hmmlm.models.base import Model
from hmmlm.models.scalar import BlockedScalar
from hmmlm.restarts import best_of
from hmmlm.runs.folders import CONFIG
from hmmlm.runs.interrupt import StopRequest
from hmmlm.runs.loggers import Logger
from hmmlm.runs.progress import Progress
from hmmlm.teachers.teacher import Teacher
from hmmlm.training.prepare import Prepared, add_blocks, text_size
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
from hmmlm.training.trainer import Trainer, TrainResult, flush_denormals, make_fabric

TRIALS, TRIAL_EPOCHS = 8, 4
"""A start is tried for 1 / TRIALS of the run: one epoch at least, TRIAL_EPOCHS at most."""


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
