"""The training loop: one for AdamW and Baum-Welch, on Lightning Fabric.

A step never waits for the device: log-likelihoods are written into a buffer there and read every `log_every` steps.
Everything that happens between steps (reading the loss, validation, checkpoints) depends on the step number alone,
so a run that was killed and resumed does what the run would have done: bit for bit on the CPU.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from lightning_fabric import Fabric

from hmmlm.data.batches import Batch
from hmmlm.errors import InputError
from hmmlm.hmm import AnyHMM, Carry
from hmmlm.initialization.teacher import Teacher
from hmmlm.learning.checkpoint import STATE, Position, load_tensors, read_state, save_folder, write_state
from hmmlm.learning.clock import Clock
from hmmlm.learning.config import RunConfig, config_to_dict
from hmmlm.learning.evaluate import Evaluation, State, carried, count_tokens, evaluate, to_device
from hmmlm.learning.history import History
from hmmlm.learning.initialize import Distillation, distilled_tokens, make_initial, set_frozen
from hmmlm.learning.interrupt import Stopped, StopRequest
from hmmlm.learning.prepare import Prepared, make_batches
from hmmlm.learning.progress import Progress, perplexity_text
from hmmlm.learning.schedule import Plateau, rate_factor
from hmmlm.learning.updaters import Step, make_updater
from hmmlm.lm import LanguageModel


class TrainingError(InputError):
    """Training cannot go on with these settings; the last good checkpoint is kept."""


@dataclass
class RunPosition(Position):
    """Of a hidden Markov model, which may have a start of its own."""

    checked: int = 0
    """Step of the last validation check; 0: none yet."""
    initialized: bool = False
    """Whether there are clusters, and a start from counts if it is to be one."""
    joint_tokens: int = 0
    """Tokens at which learning turns from P(O, S) to P(O); settled when the run begins."""


class Trainer:
    """A run in the folder `out`, from its beginning; `load` continues from `out/last`.

    `teacher` labels, and the weights of `network` are trained: each is opened here where the run needs it and has none.
    """

    def __init__(
        self, config: RunConfig, out: Path, data: Prepared, progress: Progress, teacher: Teacher | None = None,
        network: Teacher | None = None,
    ) -> None:  # fmt: skip
        self.config, self.out, self.data, self.progress = config, out, data, progress
        self.fabric = Fabric(accelerator=accelerator(config), devices=1, precision=config.train.precision)
        torch.manual_seed(config.train.seed)
        self.parameterization = make_initial(config, data, network)
        self.updater = make_updater(self.fabric, self.parameterization, config.optimizer)
        self.rate = self.updater.peak
        self.plateau = Plateau(config.schedule)
        self.train_batches = make_batches(config, data, "train")
        self.valid_batches = make_batches(config, data, "valid")
        self.position, self.saved = RunPosition(), RunPosition(step=-1)
        self.distillation: Distillation | None = None
        if config.initialization.kind != "none":
            self.distillation = Distillation(config, out, data, self.parameterization, teacher)
        self.frozen = False  # whether what a teacher set is not learnt yet
        self.final: State = None  # the filtered distribution that the next window starts from
        # log-likelihoods of the steps since the loss was last logged, and their tokens
        self.window = torch.zeros(config.train.log_every, dtype=torch.float64, device=self.fabric.device)
        self.window_tokens: list[int] = []
        self.joint = False  # whether they are of P(O, S)
        self.sequences, self.skipped = 0, 0  # learnt from since the loss was last read; left out until then

    # --- what the position says is next ---

    @property
    def total_tokens(self) -> int:
        train, per_epoch = self.config.train, self.train_batches.tokens_per_epoch
        limits = [train.epochs * per_epoch if train.epochs else None, train.max_tokens]
        return min(limit for limit in limits if limit is not None)

    @property
    def done(self) -> bool:
        return self.position.tokens >= self.total_tokens

    @property
    def distilling(self) -> bool:
        """Whether the next step learns from P(O, S)."""
        return self.position.tokens < self.position.joint_tokens

    @property
    def check_is_due(self) -> bool:
        """Checks are evenly spaced in an epoch, the last at its end; and there is one at the end of the run."""
        steps, checks = self.train_batches.steps_per_epoch, self.config.train.checks_per_epoch
        at = {-(-steps * (i + 1) // checks) for i in range(checks)}
        return self.position.checked != self.position.step and (self.position.index in at or self.done)

    def next_step(self, tokens: int) -> Step:
        """Where the next batch, of so many tokens, stands in the run."""
        position = self.position
        factor = rate_factor(self.config.schedule, position.tokens + tokens, self.total_tokens) * self.plateau.factor
        return Step(position.epoch, position.index, self.train_batches.steps_per_epoch, factor)

    # --- the loop ---

    def run(self, request: StopRequest) -> bool:
        """Train to the end (True), or until asked to stop (False); either way everything is saved."""
        with History(self.out, self.position.step, self.config.train.tensorboard) as self.history:
            try:
                self.initialize(request)
                with self.progress.phase("train", self.total_tokens, done=self.position.tokens) as self.phase:
                    self.clock = Clock(self.position.seconds)
                    self.between_steps(request)
                    while not self.done:
                        self.run_epoch(request)
            except Stopped:
                self.save()
                return False
            self.save_model("final", self.hmm())
        return True

    def initialize(self, request: StopRequest) -> None:
        """What a teacher is needed for before the next step, if anything; a new run is saved after it."""
        position = self.position
        if self.distillation is None or (position.initialized and not self.distilling):
            return
        self.distillation.prepare(self.progress, request.raise_if_asked, fresh=self.saved.step < 0)
        if not position.initialized:
            if self.config.initialization.kind == "counts":
                self.distillation.assign_counts(self.progress, request.raise_if_asked)
            self.distillation.set_embeddings()
            position.initialized, position.joint_tokens = True, distilled_tokens(self.config, self.total_tokens)
            self.save()

    def run_epoch(self, request: StopRequest) -> None:
        for batch in self.train_batches.epoch(self.position.epoch, self.position.index):
            self.step(batch)
            self.between_steps(request)
            if self.done:
                break

    def step(self, batch: Batch) -> None:
        """Learn from one batch."""
        position, tokens = self.position, count_tokens(batch)
        step, labels = self.next_step(tokens), None
        self.freeze()
        if self.distillation is not None and self.distilling:
            labels = self.distillation.labels(batch, position.epoch, position.index).to(self.fabric.device)
        else:
            self.let_go()
        batch = to_device(batch, self.fabric.device)
        result = self.updater.step(batch, carried(batch, self.final), tokens, step, labels)
        self.final, self.joint = result.final, labels is not None
        self.window[len(self.window_tokens)] = result.log_likelihood.sum(dtype=torch.float64)
        self.window_tokens.append(tokens)
        self.sequences += batch.tokens.shape[0]
        self.rate = self.updater.peak * step.factor
        position.step, position.index, position.tokens = position.step + 1, position.index + 1, position.tokens + tokens
        self.phase.advance(tokens)

    def let_go(self) -> None:
        """Of the teacher, and with it of its memory."""
        if self.distillation is not None:
            self.distillation = None
            if self.fabric.device.type == "cuda":
                torch.cuda.empty_cache()

    def freeze(self) -> None:
        """What a teacher set is not learnt for the first tokens, if so configured."""
        frozen = self.position.tokens < self.config.initialization.frozen_tokens
        if frozen != self.frozen:
            set_frozen(self.config, self.parameterization, frozen)
            self.updater.forget()
            self.frozen = frozen

    def between_steps(self, request: StopRequest) -> None:
        """Whatever is due at this step, in an order that a resumed run repeats."""
        train, position = self.config.train, self.position
        position.seconds = self.clock.seconds
        turning = self.joint and not self.distilling  # from P(O, S) to P(O): their losses are not to be mixed
        if len(self.window_tokens) == train.log_every or (self.window_tokens and (self.done or turning)):
            self.log()
        with self.clock.paused():
            if self.check_is_due:
                self.check(request)
            if position.index == self.train_batches.steps_per_epoch:
                position.epoch, position.index, self.final = position.epoch + 1, 0, None
            if position.step % train.checkpoint_every == 0 or position.checked == position.step:
                self.save()
        request.raise_if_asked()

    def log(self) -> None:
        """Read the loss of the steps since the last time."""
        tokens = sum(self.window_tokens)
        loss = -sum(self.read_window()) / tokens
        self.window_tokens.clear()
        self.history.write(
            "train", self.position.step, epoch=self.position.epoch, tokens=self.position.tokens, loss=loss,
            rate=self.rate, seconds=round(self.position.seconds, 3), tokens_per_second=round(self.clock.speed(tokens)),
            **({"objective": "joint"} if self.joint else {}),
        )  # fmt: skip
        self.phase.advance(0, loss=f"{loss:.3f}")

    def read_window(self) -> list[float]:
        """Log-likelihoods of the last steps; waits for the device. One that is not finite ends the run.

        So does what a CUDA graph hides, where a sequence that cannot be trusted counts as 0: parameters that are not
        numbers, and most of the sequences left out.
        """
        values: list[float] = self.window[: len(self.window_tokens)].tolist()
        for step, value in enumerate(values, self.position.step - len(values) + 1):
            if not math.isfinite(value):
                raise self.failure(f"the loss in training is {-value} at step {step}")
        if bool(torch.stack([p.isnan().any() for p in self.parameterization.parameters()]).any()):
            raise self.failure(f"parameters are nan after step {self.position.step}")
        skipped, sequences = int(self.parameterization.skipped), self.sequences
        lost, self.skipped, self.sequences = skipped - self.skipped, skipped, 0
        if 2 * lost > sequences:
            what = f"the probability of {lost} of the last {sequences} sequences vanished"
            raise self.failure(f"{what} until step {self.position.step}")
        return values

    def check(self, request: StopRequest) -> None:
        """Validate: history, plateau, and the best model."""
        self.read_window()
        hmm = self.hmm()
        with self.progress.phase("valid", self.valid_batches.tokens_per_epoch) as phase:

            def on_batch(tokens: int) -> None:
                phase.advance(tokens)
                request.raise_if_asked()

            result = evaluate(hmm, self.valid_batches.epoch(0), on_batch)
        loss = -result.log_likelihood / result.tokens
        if math.isnan(loss):
            raise self.failure(f"the loss in validation is nan after step {self.position.step}")
        best = loss < self.plateau.best or not self.position.checked
        self.plateau.check(loss)
        self.position.checked = self.position.step
        self.report(result, loss, best)
        if best:
            self.save_model("best", hmm)

    def report(self, result: Evaluation, loss: float, best: bool) -> None:
        """Say how validation went: history, progress, and a line that stays."""
        position = self.position
        self.history.write(
            "valid", position.step, epoch=position.epoch, tokens=position.tokens, loss=loss,
            perplexity=result.perplexity, best=best, seconds=round(position.seconds, 3),
            skipped=int(self.parameterization.skipped),
        )  # fmt: skip
        epochs = position.epoch + position.index / self.train_batches.steps_per_epoch
        self.phase.advance(0, valid=perplexity_text(result.perplexity))
        self.progress.note(
            f"epoch {epochs:.2f}, step {position.step:,}: valid perplexity {perplexity_text(result.perplexity, 2)}"
            + (" (best so far)" if best else "")
        )

    def failure(self, what: str) -> TrainingError:
        if self.config.optimizer.kind == "baum-welch":
            advice = "set optimizer.baum_welch.pseudocount above 0, or lower optimizer.baum_welch.step"
        else:
            advice = f"lower optimizer.rate (now {self.rate:.3g}) or optimizer.clip, or lengthen the warm-up"
        return TrainingError(
            f"{what} (epoch {self.position.epoch}): {advice}; "
            f"the last good checkpoint, {self.out / 'last'}, is of step {self.saved.step}"
        )

    # --- checkpoints ---

    @torch.no_grad()
    def hmm(self) -> AnyHMM:
        """The distributional parameters as they are now, detached, without anything that is for training only."""
        self.parameterization.eval()
        with self.fabric.autocast():
            hmm: AnyHMM = self.parameterization()
        self.parameterization.train()
        return hmm

    def save_model(self, link: str, hmm: AnyHMM) -> None:
        """A language model for use in `out/link`."""
        model = LanguageModel(hmm, self.data.tokenizer, config_to_dict(self.config))
        save_folder(self.out, link, f"{link}-{self.position.step:08}", model.save)

    def save(self) -> None:
        """A checkpoint to resume from in `out/last`, unless it is there already."""
        if self.saved == self.position:
            return
        self.read_window()
        tensors = {f"parameters.{name}": t for name, t in self.parameterization.state_dict().items()}
        tensors |= {f"optimizer.{name}": t for name, t in self.updater.tensors().items()}
        tensors |= {"window": self.window, "rng.cpu": torch.get_rng_state()}
        if isinstance(self.final, Carry):
            tensors |= {"carried": self.final.probs, "carried.states": self.final.states}
        elif self.final is not None:
            tensors["carried"] = self.final
        if self.fabric.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.fabric.device)
        state = {
            "config": config_to_dict(self.config),
            "vocabulary": {"size": self.data.tokenizer.vocab_size, "fingerprint": self.data.tokenizer.fingerprint()},
            "position": asdict(self.position),
            "plateau": self.plateau.state(),
            "optimizer": self.updater.scalars(),
            "window_tokens": self.window_tokens,
        }
        self.history.sync()
        save_folder(
            self.out, "last", f"step-{self.position.step:08}", lambda folder: write_state(folder, tensors, state)
        )
        self.saved = replace(self.position)

    def load(self) -> None:
        """Continue from `out/last`."""
        folder = self.out / "last"
        tensors, state = read_state(folder)
        try:
            trained, own = state["vocabulary"], self.data.tokenizer
            if (trained["size"], trained["fingerprint"]) != (own.vocab_size, own.fingerprint()):
                raise InputError(
                    f"{folder} was trained with a vocabulary of {trained['size']} tokens ({trained['fingerprint']}), "
                    f"the tokenizer has {own.vocab_size} ({own.fingerprint()}): put the run's own tokenizer back"
                )
            self.position = RunPosition(**state["position"])
            self.freeze()
            self.plateau.load(state["plateau"])
            self.updater.load(folder, tensors, "optimizer.", state["optimizer"])
            self.window_tokens = [int(n) for n in state["window_tokens"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{folder / STATE} is damaged or of another program: {error!r}") from None
        load_tensors(folder, tensors, "parameters.", self.parameterization.state_dict())
        load_tensors(folder, tensors, "", {"window": self.window})
        self.joint = self.distilling
        if self.position.index and self.config.batches.kind == "stream":
            if "carried" not in tensors:
                raise InputError(f"{folder} has no carried state: it is of another model or program")
            self.final = tensors["carried"].to(self.fabric.device)
            if "carried.states" in tensors:
                self.final = Carry(self.final, tensors["carried.states"].to(self.fabric.device))
        torch.set_rng_state(tensors["rng.cpu"])
        if "rng.cuda" in tensors and self.fabric.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.fabric.device)
        self.saved = replace(self.position)


def accelerator(config: RunConfig) -> str:
    """What to train on, cpu or cuda; an InputError if it is not there."""
    if config.train.device == "cuda" and not torch.cuda.is_available():
        raise InputError("train.device = 'cuda', but there is no CUDA device here: use 'auto' or 'cpu'")
    if config.train.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.train.device
