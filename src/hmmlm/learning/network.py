"""The training of a neural language model of our own, teacher or baseline, on the token files of a corpus.

A run is a folder: config.json, tokenizer/ and data/ (unless those of another folder are used), history.jsonl, and links
into checkpoints/: last (to resume from) and best (by validation). A run that was stopped and resumed comes to the same
parameters: what is drawn at random depends on the seed and the step alone.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from hmmlm.data.batches import Batch, ChunkBatches, StreamBatches
from hmmlm.data.corpora import Documents
from hmmlm.data.files import write_bytes
from hmmlm.errors import InputError
from hmmlm.initialization.teacher import teacher_device
from hmmlm.learning.checkpoint import STATE, Position, load_tensors, read_state, save_folder, write_state
from hmmlm.learning.config import RunConfig, TokenizerConfig
from hmmlm.learning.config_checks import check_data
from hmmlm.learning.config_network import NetworkConfig
from hmmlm.learning.evaluate import count_tokens, perplexity
from hmmlm.learning.folders import CONFIG, new_run, refuse_shorter, refuse_used
from hmmlm.learning.history import History
from hmmlm.learning.interrupt import Stopped, StopRequest, stop_on_signals
from hmmlm.learning.prepare import Prepared, find_data, is_prepared, prepare, reopen
from hmmlm.learning.progress import Phase, Progress, perplexity_text
from hmmlm.learning.schedule import rate_factor

CHANGEABLE = frozenset({"data_folder", "train"})
"""Fields that may differ when a run is resumed (of `train`, all but the seed)."""

Config = TypeVar("Config", bound=NetworkConfig)
Model = TypeVar("Model", bound=nn.Module)
State = tuple[Tensor, ...] | None
"""What a window needs of those before it; None at the beginning of an epoch, and where nothing is carried."""


class NetworkResult(NamedTuple):
    """How the training of a network ended."""

    out: Path
    finished: bool
    """False if the user interrupted it; --resume goes on."""
    steps: int
    tokens: int
    seconds: float
    best_perplexity: float
    """On the validation text, of the model in out/best; infinite before the first check."""


def train_network(
    trainer: Callable[[Config, Path, Prepared, Progress], NetworkTrainer[Config, Any]], saved: Callable[[Path], Config],
    config: Config, out: Path, resume: bool, progress: Progress | None,
) -> NetworkResult:  # fmt: skip
    """Train in the folder `out`; with `resume`, go on from its last checkpoint, with what `saved` reads there.

    Ctrl-C or SIGTERM saves and returns a result that is not `finished`.
    """
    out, progress = Path(out), progress or Progress()
    if config.schedule.kind == "plateau":
        raise InputError("schedule.kind = 'plateau' is for hidden Markov models: use 'cosine' or 'constant'")
    if resume:
        _refuse_changes(saved(out), config, out)
    else:
        refuse_used(out)
    settings = (config.model_dump_json(indent=1) + "\n").encode()
    if (out / "last").exists():
        run = trainer(config, out, reopen_data(config, out), progress)
        run.load()
        position, batch = run.position, config.batch_size * config.length
        refuse_shorter(out, position.epoch, position.tokens, run.total_tokens, batch)
        write_bytes(out / CONFIG, settings)
        progress.note(f"run folder: {out}")
    else:
        source = _find(config)
        with new_run(out, settings, begun=resume):  # in a folder where it was begun, it came to no checkpoint
            progress.note(f"run folder: {out}")
            data = reopen(source) if isinstance(source, Path) else prepare(_reading(config), source, out, progress)
            run = trainer(config, out, data, progress)
    with stop_on_signals() as request:
        finished = run.run(request)
    position = run.position
    best = perplexity(-position.best, 1) if position.best is not None else math.inf
    return NetworkResult(out, finished, position.step, position.tokens, position.seconds, best)


def reopen_data(config: NetworkConfig, run: Path) -> Prepared:
    """The token files that a run reads: those of another folder, or its own."""
    folder = Path(config.data)
    return reopen(folder if is_prepared(folder) else run)


def _refuse_changes(saved: NetworkConfig, given: NetworkConfig, out: Path) -> None:
    before, now = saved.model_dump(), given.model_dump()
    fields = [name for name in now if name not in CHANGEABLE and before[name] != now[name]]
    if saved.train.seed != given.train.seed:
        fields.append("train.seed")
    if fields:
        raise InputError(
            f"{fields[0]} is not what the run in {out} has: leave it as it is, or start a new run in another folder"
        )


def _reading(config: NetworkConfig) -> RunConfig:
    return RunConfig(data=config.data, data_folder=config.data_folder, tokenizer=config.tokenizer)


def _find(config: NetworkConfig) -> Mapping[str, Documents] | Path:
    """The text of a run, or the folder of its token files; what is wrong with them is said before anything is made."""
    check_data(config.data, config.tokenizer)
    teacher_device(config.train.device)
    if is_prepared(Path(config.data)) and config.tokenizer != TokenizerConfig():
        raise InputError(f"{config.data} has its own tokenizer: leave out --tokenizer, or give the text as --data")
    return find_data(_reading(config))


@dataclass
class NetworkPosition(Position):
    """Of a network."""

    best: float | None = None
    """Lowest validation loss a token; None before the first check."""


class NetworkTrainer(ABC, Generic[Config, Model]):
    """The loop. A kind of network says how its model and batches are made, a batch is scored and the best is kept."""

    def __init__(self, config: Config, out: Path, data: Prepared, progress: Progress) -> None:
        self.config, self.out, self.data, self.progress = config, out, data, progress
        self.device = teacher_device(config.train.device)
        self.model = self.make_model(torch.Generator().manual_seed(config.train.seed)).to(self.device)
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.rate, betas=config.betas, fused=True)
        self.batches = self.make_batches("train")
        self.valid = self.make_batches("valid")
        self.position = NetworkPosition()
        self.state: State = None
        # log-likelihood of the steps since the loss was last read, and their tokens
        self.window = torch.zeros((), dtype=torch.float64, device=self.device)
        self.window_tokens = 0

    @abstractmethod
    def make_model(self, generator: torch.Generator) -> Model:
        """The network at first."""

    @abstractmethod
    def make_batches(self, split: str) -> ChunkBatches | StreamBatches:
        """What it learns from, or is scored on."""

    @abstractmethod
    def score(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Natural log-likelihood of tokens [B,T], of each or summed, and what the next window reads on from."""

    @abstractmethod
    def keep(self, folder: Path) -> None:
        """Write the model, which is the best so far."""

    @property
    def total_tokens(self) -> int:
        train, per_epoch = self.config.train, self.batches.tokens_per_epoch
        limits = [train.epochs * per_epoch if train.epochs else None, train.max_tokens]
        return min(limit for limit in limits if limit is not None)

    @property
    def done(self) -> bool:
        return self.position.tokens >= self.total_tokens

    def run(self, request: StopRequest) -> bool:
        """Train to the end (True), or until asked to stop (False); either way everything is saved."""
        steps, checks = self.batches.steps_per_epoch, self.config.train.checks_per_epoch
        check_at = {-(-steps * (i + 1) // checks) for i in range(checks)}
        position = self.position
        with (
            History(self.out, position.step, self.config.train.tensorboard) as self.history,
            self.progress.phase("train", self.total_tokens, done=position.tokens) as phase,
        ):
            began = time.perf_counter() - position.seconds
            while not self.done:
                for batch in self.batches.epoch(position.epoch, position.index):
                    self.step(batch, phase)
                    position.seconds = time.perf_counter() - began
                    stopping = request.asked
                    checking = position.index in check_at or self.done
                    saving = checking or stopping or position.step % self.config.train.checkpoint_every == 0
                    if saving or position.step % self.config.train.log_every == 0:
                        self.log(phase)
                    if checking:
                        stopping = not self.check(request, phase)
                    if position.index == steps:
                        position.epoch, position.index = position.epoch + 1, 0
                    if saving:
                        self.save()
                    if stopping and not self.done:
                        return False
                    if self.done:
                        break
        return True

    def log_likelihood(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        mixed = self.config.train.precision == "bf16-mixed"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
            tokens = batch.tokens.to(self.device, non_blocking=True)
            return self.score(tokens, state if batch.carry else None)

    def evaluate(self, batches: ChunkBatches | StreamBatches, request: StopRequest, name: str) -> float:
        """Loss a token; raises `Stopped` if asked to stop meanwhile."""
        total, count, state = 0.0, 0, None
        self.model.eval()
        try:
            with self.progress.phase(name, batches.tokens_per_epoch) as phase, torch.no_grad():
                for batch in batches.epoch(0):
                    log_likelihood, state = self.log_likelihood(batch, state)
                    total += float(log_likelihood.sum(dtype=torch.float64))
                    count += count_tokens(batch)
                    phase.advance(count_tokens(batch))
                    request.raise_if_asked()
        finally:
            self.model.train()
        return -total / count

    def step(self, batch: Batch, phase: Phase) -> None:
        """Learn from one batch."""
        position, count = self.position, count_tokens(batch)
        factor = rate_factor(self.config.schedule, position.tokens + count, self.total_tokens)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate * factor
        torch.manual_seed(self.config.train.seed + position.step)  # dropout
        scores, self.state = self.log_likelihood(batch, self.state)
        log_likelihood = scores.sum()
        (-log_likelihood / count).backward()
        if self.config.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.window += log_likelihood.detach()
        self.window_tokens += count
        position.step, position.index, position.tokens = position.step + 1, position.index + 1, position.tokens + count
        phase.advance(count)

    def log(self, phase: Phase) -> None:
        """Read the loss of the steps since the last time; one that is not finite ends the run."""
        position, loss = self.position, -float(self.window) / self.window_tokens
        if not math.isfinite(loss):
            raise InputError(
                f"the loss is {loss} at step {position.step}: lower rate or clip, or lengthen the warm-up; "
                f"the last good checkpoint is {self.out / 'last'}"
            )
        self.window.zero_()
        self.window_tokens = 0
        self.history.write(
            "train", position.step, epoch=position.epoch, tokens=position.tokens, loss=loss,
            rate=self.optimizer.param_groups[0]["lr"], seconds=round(position.seconds, 3),
        )  # fmt: skip
        phase.advance(0, loss=f"{loss:.3f}")

    def check(self, request: StopRequest, phase: Phase) -> bool:
        """Validate and keep the best; False if asked to stop meanwhile, with nothing of the check kept."""
        position = self.position
        try:
            loss = self.evaluate(self.valid, request, "valid")
        except Stopped:
            return False
        figure = perplexity(-loss, 1)
        best = position.best is None or loss < position.best
        self.history.write(
            "valid", position.step, epoch=position.epoch, tokens=position.tokens, loss=loss, perplexity=figure,
            best=best, seconds=round(position.seconds, 3),
        )  # fmt: skip
        phase.advance(0, valid=perplexity_text(figure))
        shown = perplexity_text(figure, 2)
        self.progress.note(f"step {position.step:,}: valid perplexity {shown}" + " (best so far)" * best)
        if best:
            position.best = loss
            name = f"best-{position.step:08}"
            save_folder(self.out, "best", name, self.keep)
        return True

    # --- checkpoints ---

    def moments(self) -> dict[str, Tensor]:
        """What AdamW remembers of each parameter; zeros before the first step."""
        zeros: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            zeros |= {f"{name}.{key}": value for key, value in state.items()}
        return zeros

    def save(self) -> None:
        tensors = {f"parameters.{name}": t for name, t in self.model.state_dict().items()}
        tensors |= {f"optimizer.{name}": t for name, t in self.moments().items()}
        tensors |= {f"carried.{i}": part.contiguous() for i, part in enumerate(self.state or ())}
        fingerprint = self.data.tokenizer.fingerprint()
        state: dict[str, Any] = {"network": asdict(self.position), "fingerprint": fingerprint}
        self.history.sync()
        name = f"step-{self.position.step:08}"
        save_folder(self.out, "last", name, lambda folder: write_state(folder, tensors, state))

    def load(self) -> None:
        folder = self.out / "last"
        tensors, state = read_state(folder)
        if state.get("fingerprint") != self.data.tokenizer.fingerprint():
            raise InputError(f"{folder} was trained with another tokenizer: put the run's own tokenizer back")
        try:
            self.position = NetworkPosition(**(state.get("network") or state["teacher"]))  # as earlier runs have it
        except (KeyError, TypeError) as error:
            raise InputError(f"{folder / STATE} is damaged or of another program: {error!r}") from None
        load_tensors(folder, tensors, "parameters.", self.model.state_dict())
        load_tensors(folder, tensors, "optimizer.", self.moments())
        carried = [tensors[name] for i in range(len(tensors)) if (name := f"carried.{i}") in tensors]
        self.state = tuple(part.to(self.device) for part in carried) or None
