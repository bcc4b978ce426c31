"""The training loop: one for every learner and every phase.

A step never waits for the device: `Losses` keeps log-likelihoods there, and reads them every `log_every` steps.
Everything between steps (reading the loss, validation, checkpoints) depends on the step number alone, so that a run
that was killed and resumed does what the uninterrupted run would have done: bit for bit on the CPU.

Every process of a run (`hmmlm.distributed`) runs this loop on its rows of each batch. They take the same decisions,
because these depend on sums over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hmmlm.config.training import TrainingConfig
from hmmlm.data.batches import Batch, Batches
from hmmlm.device import device_name
from hmmlm.distributed.ranks import FirstRankError, world
from hmmlm.errors import InputError
from hmmlm.learning.checkpoints import Checkpoints
from hmmlm.learning.evaluate import Evaluation
from hmmlm.learning.learners import Learner, count_parameters
from hmmlm.learning.losses import Losses
from hmmlm.learning.schedules import MAX_HALVINGS, Plateau, lr_factor
from hmmlm.lm.scoring import perplexity
from hmmlm.runs.checkpoint import TrainingPosition
from hmmlm.runs.clock import Clock
from hmmlm.runs.history import History, NoHistory
from hmmlm.runs.interrupt import Stopped, StopRequest
from hmmlm.runs.progress import Progress, perplexity_text


class TrainingError(InputError):
    """Training cannot continue with these settings; the last good checkpoint is kept."""


@dataclass(frozen=True)
class Phase:
    """A part of training with its own batches: P(O, S) of labeled batches, or P(O)."""

    name: str
    """joint or marginal; the history marks joint losses."""
    end: int
    """Tokens of the run at which the phase ends."""
    batches: Batches
    enter: Callable[[], None] = lambda: None
    """Called when the phase starts or is resumed."""


def total_tokens(config: TrainingConfig, tokens_per_epoch: int) -> int:
    """Return the number of training tokens of a run."""
    train = config.train
    limits = [train.epochs * tokens_per_epoch if train.epochs else None, train.max_tokens]
    return min(limit for limit in limits if limit is not None)


class Fit:
    """Trains a learner through the phases of a run; `checkpoints` may load what an earlier process saved."""

    def __init__(self, train: Batches, valid: Batches, checkpoints: Checkpoints, progress: Progress) -> None:
        self.config, self.learner = config, learner = checkpoints.config, checkpoints.learner
        self.train, self.valid, self.checkpoints, self.progress = train, valid, checkpoints, progress
        self.total_tokens = total_tokens(config, train.tokens_per_epoch)
        self.position, self.plateau = TrainingPosition(), Plateau(config.schedule)
        self.losses = Losses(learner, config.train.log_every, self.failure)
        self.lr = learner.peak_lr
        self.improved = False  # at the last validation check
        self.carry: Any = None
        self.carry_rows = 0  # sequences of the last batch

    def run(self, plan: Callable[[], Sequence[Phase]], request: StopRequest, history: History | NoHistory) -> bool:
        """Train to the end of the phases (True), or until asked to stop (False); either way everything is saved.

        `plan` returns the phases, after whatever has to be computed before them.
        """
        self.history = history
        try:
            phases = plan()
            world().share_generator(self.learner.device)
            if self.checkpoints.saved.step < 0:
                self.save()
            if history.empty:  # from here on, a run without a checkpoint has lost it
                parameters = count_parameters(self.learner)
                history.write("start", 0, device=device_name(self.learner.device), parameters=parameters)
            with self.progress.phase("train", self.total_tokens, done=self.position.tokens) as self.display:
                self.clock = Clock(self.position.seconds)
                for phase in phases:
                    self.run_phase(phase, request)
        except Stopped:
            self.save()
            return False
        self.checkpoints.export("final", self.position.step)
        return True

    def run_phase(self, phase: Phase, request: StopRequest) -> None:
        """Train until the end of a phase, unless the run is already beyond it.

        A run that was stopped during its last check still has to make it.
        """
        unvalidated = phase.end >= self.total_tokens and self.validation_is_due()
        if self.position.tokens >= phase.end and not unvalidated:
            return
        phase.enter()
        self.between_steps(phase, request)
        while self.position.tokens < phase.end:
            for batch in phase.batches.epoch(self.position.epoch, self.position.index):
                self.step(batch)
                self.between_steps(phase, request)
                if self.position.tokens >= phase.end:
                    break

    def step(self, batch: Batch) -> None:
        """Train on one batch."""
        position, tokens = self.position, batch.whole_tokens()
        factor = lr_factor(self.config.schedule, position.tokens + tokens, self.total_tokens) * self.plateau.factor
        self.lr = self.learner.peak_lr * factor
        result = self.learner.step(batch, self.carry, self.lr)
        self.carry = result.carry
        self.carry_rows = batch.whole_rows()
        self.losses.add(result.log_likelihood, tokens, self.carry_rows)
        position.step += 1
        position.index += 1
        position.tokens += tokens
        self.display.advance(tokens)

    def try_out(self, learner: Learner[Any], total: int, request: StopRequest) -> float:
        """Train another learner for a number of tokens; return its loss on the validation text."""
        tokens, epoch = 0, 0
        while tokens < total:
            carry: Any = None
            for batch in self.train.epoch(epoch):
                tokens += batch.whole_tokens()
                factor = lr_factor(self.config.schedule, tokens, total)
                carry = learner.step(batch, carry, learner.peak_lr * factor).carry
                request.raise_if_asked()
                if tokens >= total:
                    break
            epoch += 1
        return learner.evaluate(self.valid.epoch(0), lambda tokens: request.raise_if_asked()).loss

    def between_steps(self, phase: Phase, request: StopRequest) -> None:
        """Do whatever is due at this step, in an order that a resumed run repeats."""
        train, position = self.config.train, self.position
        position.seconds = self.clock.seconds
        unlogged, phase_ends = len(self.losses.tokens), position.tokens >= phase.end
        if unlogged == train.log_every or (unlogged and phase_ends):  # losses of two phases are not averaged
            self.log(phase)
        with self.clock.paused():
            if self.validation_is_due():
                self.validate(request)
            if position.index == self.train.steps_per_epoch:
                position.epoch += 1
                position.index = 0
                self.carry, self.carry_rows = None, 0  # an epoch starts anew
            if position.step % train.checkpoint_every == 0 or position.checked == position.step:
                self.save()
        request.raise_if_asked()

    def validation_is_due(self) -> bool:
        """Checks are evenly spaced in an epoch, the last at its end; and there is one at the end of the run."""
        position, steps, checks = self.position, self.train.steps_per_epoch, self.config.train.checks_per_epoch
        done = position.tokens >= self.total_tokens
        # A check is due after batch ⌈steps·(i + 1)/checks⌉ for some i.
        at_check = position.index > 0 and (position.index * checks) // steps > ((position.index - 1) * checks) // steps
        return position.checked != position.step and (at_check or done)

    def log(self, phase: Phase) -> None:
        """Record the mean loss of the steps since the last record."""
        position, tokens = self.position, sum(self.losses.tokens)
        loss = -sum(self.losses.read(position.step)) / tokens
        self.losses.tokens.clear()
        figures = {"epoch": position.epoch, "tokens": position.tokens, "loss": loss, "rate": self.lr}
        figures |= {"seconds": round(position.seconds, 3), "tokens_per_second": round(self.clock.speed(tokens))}
        if phase.name == "joint":  # of P(O, S), which is not a perplexity of the text
            self.history.write("train", position.step, **figures, objective="joint")
            self.display.advance(0, **{"joint loss": f"{loss:.3f}"})
        else:
            self.history.write("train", position.step, **figures)
            self.display.advance(0, **{"train perplexity": perplexity_text(perplexity(-loss, 1))})

    def validate(self, request: StopRequest) -> None:
        """Validate: history, plateau, and the best model."""
        self.losses.read(self.position.step)
        with self.progress.phase("valid", self.valid.tokens_per_epoch) as phase:

            def on_batch(tokens: int) -> None:
                phase.advance(tokens)
                request.raise_if_asked()

            result = self.learner.evaluate(self.valid.epoch(0), on_batch)
        if math.isnan(result.loss):
            raise self.failure(f"the validation loss is NaN after step {self.position.step}")
        self.improved = result.loss < self.plateau.best or not self.position.checked
        diverges = self.plateau.check(result.loss)
        self.position.checked = self.position.step
        self.log_validation(result, self.improved)
        if self.improved:
            self.checkpoints.export("best", self.position.step)
        if diverges:
            halved = f"half the rate ({self.plateau.halvings} of {MAX_HALVINGS} times)"
            self.progress.note(
                "valid perplexity is more than 1.5 times the best, twice in a row: continuing from the parameters of "
                f"step {self.checkpoints.restore():,} at {halved}"
            )

    def log_validation(self, result: Evaluation, best: bool) -> None:
        """Record a validation check: history, progress, and a line that remains."""
        position = self.position
        figures = {"epoch": position.epoch, "tokens": position.tokens, "loss": result.loss}
        figures |= {"perplexity": result.perplexity, "best": best, "seconds": round(position.seconds, 3)}
        self.history.write("valid", position.step, **figures, skipped=self.losses.skipped)
        epochs = position.epoch + position.index / self.train.steps_per_epoch
        self.display.advance(0, **{"valid perplexity": perplexity_text(result.perplexity)})
        self.progress.note(
            f"epoch {epochs:.2f}, step {position.step:,}: valid perplexity {perplexity_text(result.perplexity, 2)}"
            + (" (best so far)" if best else "")
        )

    def failure(self, what: str) -> InputError:
        kind = TrainingError if world().first else FirstRankError  # every process notices it, one reports it
        advice = self.learner.optimizer.advice(self.lr)
        return kind(f"{what} (epoch {self.position.epoch}): {advice}; {self.checkpoints.last_good}")

    def save(self) -> None:
        """Write a checkpoint, unless there is one of this position already."""
        if self.checkpoints.saved != self.position:
            self.losses.read(self.position.step)
            self.history.sync()
            self.checkpoints.save(self, best=self.improved and self.position.checked == self.position.step)
