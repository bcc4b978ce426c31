"""The training loop: one for every learner and every phase.

A step never waits for the device: log-likelihoods are written into a buffer there and read every `log_every` steps.
Everything between steps (reading the loss, validation, checkpoints) depends on the step number alone, so that a run
that was killed and resumed does what the uninterrupted run would have done: bit for bit on the CPU.

Every process of a run (`hmmlm.distributed`) runs this loop on its rows of each batch. They take the same decisions,
because these depend on sums over all of them; rank 0 writes the files, with everything in the order of one process.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hmmlm.config.training import TrainingConfig
from hmmlm.data.batches import Batch, Batches, own_share
from hmmlm.data.files import require_like
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.device import device_name
from hmmlm.distributed.ranks import FirstRankError, world
from hmmlm.errors import InputError
from hmmlm.learning.evaluate import Evaluation
from hmmlm.learning.learners import Learner, count_parameters
from hmmlm.learning.schedules import Plateau, rate_factor
from hmmlm.lm.scoring import perplexity
from hmmlm.runs.checkpoint import (
    PREVIOUS,
    TENSORS,
    VALUES,
    TrainingPosition,
    load_tensors,
    read_checkpoint,
    save_folder,
    verify_checkpoint,
    write_checkpoint,
)
from hmmlm.runs.clock import Clock
from hmmlm.runs.history import HISTORY, History, NoHistory, read_history
from hmmlm.runs.interrupt import Stopped, StopRequest
from hmmlm.runs.loggers import Logger
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
    """Trains a learner in the folder `out` of a run; `load` continues from `out/last`."""

    def __init__(
        self,
        config: TrainingConfig,
        out: Path,
        learner: Learner[Any],
        tokenizer: Tokenizer,
        train: Batches,
        valid: Batches,
        progress: Progress,
        loggers: Sequence[Logger] = (),
    ) -> None:
        self.config, self.out, self.learner, self.tokenizer, self.progress = config, out, learner, tokenizer, progress
        self.train, self.valid, self.loggers, self.ranks = train, valid, loggers, world()
        self.total_tokens = total_tokens(config, train.tokens_per_epoch)
        self.plateau = Plateau(config.schedule)
        self.position, self.saved = TrainingPosition(), TrainingPosition(step=-1)
        self.rate = learner.peak_rate
        self.carry: Any = None
        self.rows = 0  # sequences of the last batch
        # Log-likelihoods of the steps since the loss was last logged, of this process, and the tokens of all.
        self.window = torch.zeros(config.train.log_every, dtype=torch.float64, device=learner.device)
        self.window_tokens: list[int] = []
        self.sequences, self.skipped = 0, 0  # trained on since the loss was last read; dropped until then

    # --- the loop ---

    def run(self, plan: Callable[[], Sequence[Phase]], request: StopRequest) -> bool:
        """Train to the end of the phases (True), or until asked to stop (False); either way everything is saved.

        `plan` returns the phases, after whatever has to be computed before them.
        """
        with self.open_history() as self.history:
            try:
                phases = plan()
                self.share_generator()
                if self.saved.step < 0:
                    self.save()
                if self.history.empty:  # from here on, a run without a checkpoint has lost it
                    parameters = count_parameters(self.learner)
                    self.history.write("start", 0, device=device_name(self.learner.device), parameters=parameters)
                with self.progress.phase("train", self.total_tokens, done=self.position.tokens) as self.display:
                    self.clock = Clock(self.position.seconds)
                    for phase in phases:
                        self.run_phase(phase, request)
            except Stopped:
                self.save()
                return False
            self.export("final")
        return True

    def open_history(self) -> History | NoHistory:
        if self.ranks.first:
            settings = self.config.dump()
            return History(self.out, self.saved.step, self.config.train.tensorboard, self.loggers, settings)
        return NoHistory()

    def share_generator(self) -> None:
        """Give all processes the generator of rank 0, so that they drop the same states."""
        torch.set_rng_state(self.ranks.on_first(torch.get_rng_state))
        if self.learner.device.type == "cuda" and self.ranks.count > 1:
            device = self.learner.device
            torch.cuda.set_rng_state(self.ranks.on_first(lambda: torch.cuda.get_rng_state(device)), device)

    def run_phase(self, phase: Phase, request: StopRequest) -> None:
        """Train until the end of a phase, unless the run is already beyond it.

        A run that was stopped during its last check still has to make it.
        """
        unchecked = phase.end >= self.total_tokens and self.check_is_due()
        if self.position.tokens >= phase.end and not unchecked:
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
        factor = rate_factor(self.config.schedule, position.tokens + tokens, self.total_tokens) * self.plateau.factor
        self.rate = self.learner.peak_rate * factor
        result = self.learner.step(batch, self.carry, self.rate)
        self.carry = result.carry
        self.window[len(self.window_tokens)] = result.log_likelihood
        self.window_tokens.append(tokens)
        self.rows = batch.whole_rows()
        self.sequences += self.rows
        position.step, position.index, position.tokens = position.step + 1, position.index + 1, position.tokens + tokens
        self.display.advance(tokens)

    def between_steps(self, phase: Phase, request: StopRequest) -> None:
        """Do whatever is due at this step, in an order that a resumed run repeats."""
        train, position = self.config.train, self.position
        position.seconds = self.clock.seconds
        # Losses of two phases are not averaged.
        if len(self.window_tokens) == train.log_every or (self.window_tokens and position.tokens >= phase.end):
            self.log(phase)
        with self.clock.paused():
            if self.check_is_due():
                self.check(request)
            if position.index == self.train.steps_per_epoch:
                position.epoch, position.index, self.carry, self.rows = position.epoch + 1, 0, None, 0
            if position.step % train.checkpoint_every == 0 or position.checked == position.step:
                self.save()
        request.raise_if_asked()

    def check_is_due(self) -> bool:
        """Checks are evenly spaced in an epoch, the last at its end; and there is one at the end of the run."""
        position, steps, checks = self.position, self.train.steps_per_epoch, self.config.train.checks_per_epoch
        done = position.tokens >= self.total_tokens
        # A check is due after batch ⌈steps·(i + 1)/checks⌉ for some i.
        at_check = position.index > 0 and (position.index * checks) // steps > ((position.index - 1) * checks) // steps
        return position.checked != position.step and (at_check or done)

    def log(self, phase: Phase) -> None:
        """Record the mean loss of the steps since the last record."""
        tokens = sum(self.window_tokens)
        loss = -sum(self.read_window()) / tokens
        self.window_tokens.clear()
        self.history.write(
            "train",
            self.position.step,
            epoch=self.position.epoch,
            tokens=self.position.tokens,
            loss=loss,
            rate=self.rate,
            seconds=round(self.position.seconds, 3),
            tokens_per_second=round(self.clock.speed(tokens)),
            **({"objective": "joint"} if phase.name == "joint" else {}),
        )
        joint = {"joint loss": f"{loss:.3f}"}  # of P(O, S), which is not a perplexity of the text
        marginal = {"train perplexity": perplexity_text(perplexity(-loss, 1))}
        self.display.advance(0, **(joint if phase.name == "joint" else marginal))

    def read_window(self) -> list[float]:
        """Return the log-likelihoods of the last steps; waits for the device. One that is not finite ends the run.

        So does what a CUDA graph hides, where a dropped sequence counts as 0: NaN parameters, and most sequences
        dropped.
        """
        values = self.ranks.sum_numbers(self.window[: len(self.window_tokens)].tolist())
        for step, value in enumerate(values, self.position.step - len(values) + 1):
            if not math.isfinite(value):
                raise self.failure(f"the training loss is {-value} at step {step}")
        parameters = (p for p in self.learner.parameters().values() if p.is_floating_point())
        if self.ranks.any(bool(torch.stack([p.isnan().any() for p in parameters]).any())):
            raise self.failure(f"parameters are NaN after step {self.position.step}")
        skipped, sequences = int(self.ranks.sum_numbers([self.learner.skipped()])[0]), self.sequences
        lost, self.skipped, self.sequences = skipped - self.skipped, skipped, 0
        if 2 * lost > sequences:
            what = f"the probability of {lost} of the last {sequences} sequences underflowed"
            raise self.failure(f"{what} before step {self.position.step}")
        return values

    def check(self, request: StopRequest) -> None:
        """Validate: history, plateau, and the best model."""
        self.read_window()
        with self.progress.phase("valid", self.valid.tokens_per_epoch) as phase:

            def on_batch(tokens: int) -> None:
                phase.advance(tokens)
                request.raise_if_asked()

            result = self.learner.evaluate(self.valid.epoch(0), on_batch)
        if math.isnan(result.loss):
            raise self.failure(f"the validation loss is NaN after step {self.position.step}")
        best = result.loss < self.plateau.best or not self.position.checked
        self.plateau.check(result.loss)
        self.position.checked = self.position.step
        self.report(result, best)
        if best:
            self.export("best")

    def report(self, result: Evaluation, best: bool) -> None:
        """Record a validation check: history, progress, and a line that remains."""
        position = self.position
        self.history.write(
            "valid",
            position.step,
            epoch=position.epoch,
            tokens=position.tokens,
            loss=result.loss,
            perplexity=result.perplexity,
            best=best,
            seconds=round(position.seconds, 3),
            skipped=self.skipped,
        )
        epochs = position.epoch + position.index / self.train.steps_per_epoch
        self.display.advance(0, **{"valid perplexity": perplexity_text(result.perplexity)})
        self.progress.note(
            f"epoch {epochs:.2f}, step {position.step:,}: valid perplexity {perplexity_text(result.perplexity, 2)}"
            + (" (best so far)" if best else "")
        )

    def failure(self, what: str) -> InputError:
        kind = TrainingError if self.ranks.first else FirstRankError  # every process notices it, one reports it
        return kind(
            f"{what} (epoch {self.position.epoch}): {self.learner.optimizer.advice(self.rate)}; "
            f"the last good checkpoint, {self.out / 'last'}, is of step {self.saved.step}"
        )

    # --- checkpoints ---

    def export(self, link: str) -> None:
        """Write the model for use to `out/link`."""
        name = f"{link}-{self.position.step:08}"
        self.ranks.on_first(lambda: save_folder(self.out, link, name, self.learner.export))

    def save(self) -> None:
        """Write a checkpoint to `out/last`, unless it is there already."""
        if self.saved == self.position:
            return
        self.read_window()
        self.check_ranks()
        self.collect()
        moments, values = self.learner.optimizer.state_dict()
        tensors = {f"parameters.{name}": t for name, t in self.learner.parameters().items()}
        tensors |= {f"optimizer.{name}": t for name, t in moments.items()}
        tensors |= {f"carry.{name}": t for name, t in self.gather_carry().items()}
        tensors |= {"window": self.window, "rng.cpu": torch.get_rng_state()}
        if self.learner.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.learner.device)
        content = {
            "config": self.config.dump(),
            "vocabulary": {"size": self.tokenizer.vocab_size, "fingerprint": self.tokenizer.fingerprint()},
            "position": self.stored_position(),
            "plateau": self.plateau.state_dict(),
            "optimizer": values,
            "window_tokens": self.window_tokens,
        }
        self.history.sync()
        name = f"step-{self.position.step:08}"

        def write(folder: Path) -> None:
            write_checkpoint(folder, tensors, content)

        self.ranks.on_first(lambda: save_folder(self.out, "last", name, write, verify_checkpoint, PREVIOUS))
        self.saved = replace(self.position)

    def collect(self) -> None:
        """Move what each process has of its own to rank 0: expected counts and the losses since the last record."""
        self.learner.optimizer.collect()
        if self.ranks.count > 1:
            self.window.copy_(torch.tensor(self.ranks.sum_numbers(self.window.tolist())))
            self.keep_in_first()

    def keep_in_first(self) -> None:
        """Let only rank 0 have the losses since the last record, as a checkpoint stores them."""
        if not self.ranks.first:
            self.window.zero_()

    def gather_carry(self) -> dict[str, Tensor]:
        """Return the carry of all sequences of the last batch, in their order."""
        own = self.learner.carry_tensors(self.carry)
        if self.ranks.count == 1 or not own:
            return own
        rows = len(range(self.ranks.rank, self.rows, self.ranks.count))  # without a spare one
        parts = self.ranks.gather({name: tensor[:rows].cpu() for name, tensor in own.items()})
        gathered = {name: tensor.new_empty(self.rows, *tensor.shape[1:], device="cpu") for name, tensor in own.items()}
        for rank, part in enumerate(parts):
            for name, tensor in part.items():
                gathered[name][rank :: self.ranks.count] = tensor
        return gathered

    def own_carry(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of this process in the carry of all sequences, or the first row as a spare one."""
        if self.ranks.count == 1 or not tensors:
            return tensors
        self.rows = len(next(iter(tensors.values())))
        own = own_share().rows(self.rows)
        return {name: tensor[own] for name, tensor in tensors.items()}

    def check_ranks(self) -> None:
        """Raise an InputError that names a rank whose parameters or random numbers differ from those of rank 0."""
        if self.ranks.count == 1:
            return
        generator = zlib.crc32(torch.get_rng_state().numpy().data)
        parameters = [float(p.sum(dtype=torch.float64)) for p in self.learner.parameters().values()]
        first, *others = self.ranks.gather((generator, parameters))
        for rank, other in enumerate(others, 1):
            if other != first:
                what = "parameters" if other[1] != first[1] else "random numbers"
                raise InputError(
                    f"the {what} of rank {rank} and rank 0 differ after step {self.position.step}: start all processes "
                    f"with the same versions of hmmlm and torch; the last good checkpoint, {self.out / 'last'}, is of "
                    f"step {self.saved.step}"
                )

    def stored_position(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self.position).items() if name != "seconds"}

    def load(self) -> None:
        """Continue from `out/last`."""
        folder, learner = self.out / "last", self.learner
        tensors, content = read_checkpoint(folder)
        self.check_checkpoint(folder / VALUES, content)
        position = {name: content["position"][name] for name in self.stored_position()}
        self.position = TrainingPosition(**position, seconds=self.seconds_until(position["step"]))
        self.plateau.load(content["plateau"])
        self.window_tokens = content["window_tokens"]
        load_tensors(folder, tensors, "parameters.", learner.parameters())
        load_tensors(folder, tensors, "", {"window": self.window})
        self.keep_in_first()
        learner.optimizer.load(folder, tensors, content["optimizer"])
        carried = {name.removeprefix("carry."): t for name, t in tensors.items() if name.startswith("carry.")}
        rng = {"rng.cpu": torch.get_rng_state()}
        load_tensors(folder, tensors, "", rng)
        try:
            self.carry = learner.load_carry(self.own_carry(carried))
            torch.set_rng_state(rng["rng.cpu"])
        except (TypeError, KeyError, RuntimeError) as error:
            raise InputError(f"{folder / TENSORS}: carry or rng.cpu is damaged: {error}") from None
        if self.position.index and self.config.batches.kind == "stream" and self.carry is None:
            raise InputError(f"{folder} has no carry: it belongs to another model or program")
        if "rng.cuda" in tensors and learner.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.cuda"], learner.device)
        self.saved = replace(self.position)

    def check_checkpoint(self, path: Path, content: dict[str, Any]) -> None:
        """Raise an InputError that names what is wrong in the JSON file of a checkpoint."""
        like: dict[str, Any] = {
            "vocabulary": {"size": 0, "fingerprint": ""},
            "position": self.stored_position(),
            "plateau": self.plateau.state_dict(),
            "optimizer": self.learner.optimizer.state_dict()[1],
            "window_tokens": [0],
        }
        if isinstance(content.get("plateau"), dict) and "best" in content["plateau"]:  # from the first check on
            like["plateau"]["best"] = 0.0
        require_like(path, content, like)
        trained, own = content["vocabulary"], self.tokenizer
        if (trained["size"], trained["fingerprint"]) != (own.vocab_size, own.fingerprint()):
            raise InputError(
                f"{path} was trained with a vocabulary of {trained['size']} tokens ({trained['fingerprint']}), "
                f"the tokenizer has {own.vocab_size} ({own.fingerprint()}): put the run's own tokenizer back"
            )
        for name, value, limit in (
            # At the end of an epoch, during whose check the run was stopped, it equals the number of steps.
            ("position.index", content["position"]["index"], self.train.steps_per_epoch + 1),
            ("the length of window_tokens", len(content["window_tokens"]), self.config.train.log_every),
        ):
            if value >= limit:
                raise InputError(f"{path}: {name} is {value}, but must be below {limit}: the file is damaged")

    def seconds_until(self, step: int) -> float:
        """Return the seconds of the run until a step, as far as the history has them."""
        records = read_history(self.out / HISTORY) if (self.out / HISTORY).exists() else []
        seconds = [record.get("seconds") for record in records if record["step"] <= step]
        return max((value for value in seconds if isinstance(value, float)), default=0.0)
