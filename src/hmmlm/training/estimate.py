"""What a run would cost, from a few real steps: `hmmlm train --dry-run`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hmmlm.config.defaults import complete
from hmmlm.config.initialization import BigramConfig
from hmmlm.config.run import RunConfig
from hmmlm.data.batches import Batch, Batches
from hmmlm.device import peak_memory, pick_device
from hmmlm.distillation.next_words import NextWordBatches
from hmmlm.hmm import Carry
from hmmlm.learning.evaluate import select_carry
from hmmlm.learning.fit import total_tokens
from hmmlm.learning.fused_adamw import fuse
from hmmlm.learning.learners import HmmLearner, Learner
from hmmlm.models.base import BlockedConfig
from hmmlm.runs.progress import Progress
from hmmlm.training.prepare import (
    Prepared,
    check_data,
    check_memory,
    count_blocks,
    find_data,
    make_batches,
    make_blocks,
    prepare,
    text_size,
    with_actual_text,
)
from hmmlm.training.train import make_learner
from hmmlm.training.trainer import describe, flush_denormals, make_fabric
from hmmlm.training.warm_start import check_teacher

_WARM_UP = {"cpu": 1, "cuda": 6}  # untimed steps; a GPU compiles kernels and records a graph
_SECONDS = 2.0  # timed steps end after this time,
_STEPS = {"cpu": 10, "cuda": 100}  # or after this many
_CHECKED = 3  # batches of a validation check that are timed


class Estimate(NamedTuple):
    """What a run costs."""

    about: str  # device, parameters and text
    likelihood: str  # what computes the likelihood, and why others do not
    memory: int  # bytes that the process used
    step_seconds: float
    steps_per_epoch: int
    check_seconds: float  # of one validation check
    checks_per_epoch: int
    epochs: float
    tokens_per_second: float  # of training steps

    @property
    def epoch_seconds(self) -> float:
        return self.steps_per_epoch * self.step_seconds + self.checks_per_epoch * self.check_seconds


@flush_denormals()
def estimate(config: RunConfig, progress: Progress) -> Estimate:
    """Run a few steps of a configuration in a temporary folder, and measure them.

    Words are assigned to blocks in turn, because clustering takes long. The initialization is not run: a step of
    P(O, S) with labels takes less time than one of P(O). No teacher draws next words.
    """
    config = with_actual_text(config, None)
    config.model.check_files()
    check_data(config)
    with tempfile.TemporaryDirectory() as scratch:
        data = prepare(config, find_data(config), Path(scratch), progress)
        config, line = complete(config, text_size(data))
        if line:
            progress.note(line)
        data = replace(data, block_of_word=_quick_blocks(config, data, progress))
        check_memory(
            config.model.size(data.tokenizer.vocab_size), config.optimizer.kind, pick_device(config.train.device)
        )
        learner = make_learner(config, make_fabric(config), data)
        training, validation = (make_batches(config, data, split) for split in ("train", "valid"))
        step, tokens = _time_steps(fuse(learner), _with_next_words(config, data, training))
        return Estimate(
            describe(learner, data),
            _explain_choice(learner, validation),
            peak_memory(learner.device),
            step,
            training.steps_per_epoch,
            _time_check(learner, validation),
            config.train.checks_per_epoch,
            total_tokens(config, training.tokens_per_epoch) / training.tokens_per_epoch,
            tokens / step,
        )


def _explain_choice(learner: HmmLearner, batches: Batches) -> str:
    """Return the implementation that scores a batch, and why the others refuse it."""
    batch = next(iter(batches.epoch(0)))
    chosen, refused = learner.hmm().implementation(batch.tokens.to(learner.device), batch.lengths)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    return f"likelihood: {chosen}" + (f" ({reasons})" if reasons else "")


def _with_next_words(config: RunConfig, data: Prepared, batches: Batches) -> Batches:
    """Return the batches with a random word in place of each that a teacher would draw, if the run has a teacher."""
    settings, tokens = config.next_words, data.tokens["train"]
    if settings.teacher is None:
        return batches
    check_teacher(config, data.tokenizer)
    words = np.random.default_rng(0).integers(data.tokenizer.vocab_size, size=(len(tokens), 1))
    return NextWordBatches(batches, words, settings.samples, config.train.seed)


def _quick_blocks(config: RunConfig, data: Prepared, progress: Progress) -> torch.Tensor | None:
    """Return a block of each word [V], without clustering; None if the model has no blocks."""
    model, tokenizer = config.model, data.tokenizer
    if not isinstance(model, BlockedConfig) or not model.blocks:
        return None
    if isinstance(config.initialization, BigramConfig):
        return torch.arange(tokenizer.vocab_size) % model.blocks
    if model.clusters is not None:
        return torch.tensor(make_blocks(model, tokenizer, data.tokens["train"], progress))
    return torch.arange(tokenizer.vocab_size) % count_blocks(model, data.tokens["train"])


def _time_steps(learner: Learner[Carry], batches: Batches) -> tuple[float, float]:
    """Return the mean time and the mean number of tokens of a training step."""
    kind, carry = learner.device.type, None
    begun, steps, tokens = time.perf_counter(), 0, 0
    for done, batch in enumerate(_cycle(batches)):
        if done == _WARM_UP[kind]:
            _synchronize(learner.device)
            begun, steps, tokens = time.perf_counter(), 0, 0
        carry = learner.step(batch, select_carry(batch, carry), learner.peak_lr).carry
        steps, tokens = steps + 1, tokens + batch.num_tokens()
        warm = done >= _WARM_UP[kind] or kind == "cpu"  # on a CPU, a step that takes as long needs no warm-up
        if (warm and time.perf_counter() - begun > _SECONDS) or (done >= _WARM_UP[kind] and steps >= _STEPS[kind]):
            break
    _synchronize(learner.device)
    return (time.perf_counter() - begun) / steps, tokens / steps


def _time_check(learner: Learner[Carry], batches: Batches) -> float:
    """Return the time of a validation check: of the model itself, and per batch."""

    def seconds(count: int) -> float:
        return _seconds(lambda: learner.evaluate(islice(batches.epoch(0), count), lambda tokens: None), learner.device)

    warm_up = seconds(1)
    if warm_up > _SECONDS:
        return warm_up * batches.steps_per_epoch
    count = min(_CHECKED, batches.steps_per_epoch)
    first = seconds(1)
    each = max(0.0, (seconds(count) - first) / (count - 1)) if count > 1 else 0.0
    return first + each * (batches.steps_per_epoch - 1)


def _cycle(batches: Batches) -> Iterator[Batch]:
    """Yield batches without end; a short text has fewer than are timed."""
    epoch = 0
    while True:
        yield from batches.epoch(epoch)
        epoch += 1


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    _synchronize(device)
    begun = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - begun


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
