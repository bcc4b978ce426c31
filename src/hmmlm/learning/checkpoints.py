"""Checkpoints of the training loop: everything of a run that changes from step to step, of all its processes.

Rank 0 writes the files, with everything in the order of one process.
"""

from __future__ import annotations

import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hmmlm.config.training import TrainingConfig
from hmmlm.data.batches import Batches, own_share
from hmmlm.data.files import require_like
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.distributed.ranks import world
from hmmlm.errors import InputError
from hmmlm.learning.learners import Learner
from hmmlm.learning.losses import Losses
from hmmlm.learning.schedules import OPTIONAL, Plateau
from hmmlm.runs.checkpoint import (
    PREVIOUS,
    RESTORE,
    TENSORS,
    VALUES,
    TrainingPosition,
    load_tensors,
    read_checkpoint,
    save_folder,
    verify_checkpoint,
    write_checkpoint,
)
from hmmlm.runs.history import HISTORY, read_history


class Resumable(Protocol):
    """What a checkpoint stores of a training loop, besides its learner."""

    train: Batches
    position: TrainingPosition
    plateau: Plateau
    losses: Losses
    carry: Any
    carry_rows: int


class Checkpoints:
    """The checkpoints of a run in its folder `out`, and its models for use."""

    def __init__(self, config: TrainingConfig, out: Path, learner: Learner[Any], tokenizer: Tokenizer) -> None:
        self.config, self.out, self.learner, self.ranks = config, out, learner, world()
        self.vocabulary = {"size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint()}
        self.saved = TrainingPosition(step=-1)

    @property
    def last_good(self) -> str:
        return f"the last good checkpoint, {self.out / 'last'}, is of step {self.saved.step}"

    def export(self, link: str, step: int) -> None:
        """Write the model for use to `out/link`."""
        self.ranks.on_first(lambda: save_folder(self.out, link, f"{link}-{step:08}", self.learner.export))

    def save(self, loop: Resumable, best: bool = False) -> None:
        """Write a checkpoint to `out/last`; `best`: that of the best validation check so far."""
        position, learner = loop.position, self.learner
        self.check_ranks(position.step)
        learner.optimizer.collect()
        loop.losses.collect()
        moments, values = learner.optimizer.state_dict()
        tensors = {f"parameters.{name}": t for name, t in learner.parameters().items()}
        tensors |= {f"optimizer.{name}": t for name, t in moments.items()}
        tensors |= {f"carry.{name}": t for name, t in self.gather_carry(loop.carry, loop.carry_rows).items()}
        tensors |= {"window": loop.losses.log_likelihoods, "rng.cpu": torch.get_rng_state()}
        if learner.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(learner.device)
        content = {
            "config": self.config.dump(),
            "vocabulary": self.vocabulary,
            "position": _stored(position),
            "plateau": loop.plateau.state_dict(),
            "optimizer": values,
            "window_tokens": loop.losses.tokens,
        }

        def write(folder: Path) -> None:
            write_checkpoint(folder, tensors, content)

        name = f"step-{position.step:08}"
        also = RESTORE if best else None
        self.ranks.on_first(lambda: save_folder(self.out, "last", name, write, verify_checkpoint, PREVIOUS, also))
        self.saved = replace(position)

    def load(self, loop: Resumable) -> None:
        """Continue from `out/last`."""
        folder, learner = self.out / "last", self.learner
        tensors, content = read_checkpoint(folder)
        self.check_content(folder / VALUES, content, loop)
        position = {name: content["position"][name] for name in _stored(loop.position)}
        loop.position = TrainingPosition(**position, seconds=self.seconds_until(position["step"]))
        loop.plateau.load(content["plateau"])
        loop.losses.tokens = content["window_tokens"]
        self.load_learner(folder, tensors, content)
        load_tensors(folder, tensors, "", {"window": loop.losses.log_likelihoods})
        self.ranks.keep_in_first([loop.losses.log_likelihoods])
        carry = {name.removeprefix("carry."): t for name, t in tensors.items() if name.startswith("carry.")}
        rng = {"rng.cpu": torch.get_rng_state()}
        load_tensors(folder, tensors, "", rng)
        try:
            if self.ranks.count > 1 and carry:
                loop.carry_rows = len(next(iter(carry.values())))
                carry = {name: tensor[own_share().rows(loop.carry_rows)] for name, tensor in carry.items()}
            loop.carry = learner.load_carry(carry)
            torch.set_rng_state(rng["rng.cpu"])
        except (TypeError, KeyError, RuntimeError) as error:
            raise InputError(f"{folder / TENSORS}: carry or rng.cpu is damaged: {error}") from None
        if loop.position.index and self.config.batches.kind == "stream" and loop.carry is None:
            raise InputError(f"{folder} has no carry: it belongs to another model or program")
        if "rng.cuda" in tensors and learner.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.cuda"], learner.device)
        self.saved = replace(loop.position)

    def restore(self) -> int:
        """Load parameters and optimizer as they were at the best validation check; return its step."""
        folder = self.out / RESTORE
        if not folder.exists():  # an earlier version started the run
            folder = self.out / "last"
        tensors, content = read_checkpoint(folder)
        self.load_learner(folder, tensors, content)
        return int(content["position"]["step"])

    def load_learner(self, folder: Path, tensors: dict[str, Tensor], content: dict[str, Any]) -> None:
        """Load the parameters and the optimizer of a checkpoint."""
        load_tensors(folder, tensors, "parameters.", self.learner.parameters())
        self.learner.optimizer.load(folder, tensors, content["optimizer"])

    def check_content(self, path: Path, content: dict[str, Any], loop: Resumable) -> None:
        """Raise an InputError that names what is wrong in the JSON file of a checkpoint."""
        like: dict[str, Any] = {
            "vocabulary": {"size": 0, "fingerprint": ""},
            "position": _stored(loop.position),
            "plateau": loop.plateau.state_dict(),
            "optimizer": self.learner.optimizer.state_dict()[1],
            "window_tokens": [0],
        }
        if isinstance(content.get("plateau"), dict):
            optional = {"best": 0.0, **dict.fromkeys(OPTIONAL, 0)}
            like["plateau"] |= {name: value for name, value in optional.items() if name in content["plateau"]}
        require_like(path, content, like)
        trained, own = content["vocabulary"], self.vocabulary
        if any(trained[name] != value for name, value in own.items()):
            raise InputError(
                f"{path} was trained with a vocabulary of {trained['size']} tokens ({trained['fingerprint']}), "
                f"the tokenizer has {own['size']} ({own['fingerprint']}): put the run's own tokenizer back"
            )
        for name, value, limit in (
            # At the end of an epoch, during whose check the run was stopped, it equals the number of steps.
            ("position.index", content["position"]["index"], loop.train.steps_per_epoch + 1),
            ("the length of window_tokens", len(content["window_tokens"]), self.config.train.log_every),
        ):
            if value >= limit:
                raise InputError(f"{path}: {name} is {value}, but must be below {limit}: the file is damaged")

    def seconds_until(self, step: int) -> float:
        """Return the seconds of the run until a step, as far as the history has them."""
        records = read_history(self.out / HISTORY) if (self.out / HISTORY).exists() else []
        seconds = [record.get("seconds") for record in records if record["step"] <= step]
        return max((value for value in seconds if isinstance(value, float)), default=0.0)

    # --- several processes ---

    def gather_carry(self, carry: Any, rows: int) -> dict[str, Tensor]:
        """Return the carry of all `rows` sequences of the last batch, in their order."""
        own = self.learner.carry_tensors(carry)
        if self.ranks.count == 1 or not own:
            return own
        count = len(range(self.ranks.rank, rows, self.ranks.count))  # without padding
        parts = self.ranks.gather({name: tensor[:count].cpu() for name, tensor in own.items()})
        gathered = {name: tensor.new_empty(rows, *tensor.shape[1:], device="cpu") for name, tensor in own.items()}
        for rank, part in enumerate(parts):
            for name, tensor in part.items():
                gathered[name][rank :: self.ranks.count] = tensor
        return gathered

    def check_ranks(self, step: int) -> None:
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
                    f"the {what} of rank {rank} and rank 0 differ after step {step}: start all processes with the same "
                    f"versions of hmmlm and torch; {self.last_good}"
                )


def _stored(position: TrainingPosition) -> dict[str, Any]:
    return {name: value for name, value in asdict(position).items() if name != "seconds"}
