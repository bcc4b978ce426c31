"""Training a teacher of our own: the transformer of `initialization.transformer_lm`, on the token files of a corpus."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hmmlm.data.batches import ChunkBatches
from hmmlm.initialization.transformer_lm import TransformerLM, TransformerShape, save_teacher
from hmmlm.learning.config_teacher import TeacherConfig, TransformerConfig, saved_teacher_config
from hmmlm.learning.network import NetworkResult, NetworkTrainer, State, train_network
from hmmlm.learning.progress import Progress

__all__ = ["TeacherConfig", "TransformerConfig", "saved_teacher_config", "train_teacher"]


def train_teacher(
    config: TeacherConfig, out: Path, resume: bool = False, progress: Progress | None = None
) -> NetworkResult:
    """Train in the folder `out`, which `open_teacher` then takes; with `resume`, go on from its last checkpoint.

    Ctrl-C or SIGTERM saves and returns a result that is not `finished`.
    """
    TransformerShape(vocab_size=1, context=1, **config.model.model_dump())  # says what does not go together
    return train_network(TeacherTrainer, saved_teacher_config, config, out, resume, progress)


class TeacherTrainer(NetworkTrainer[TeacherConfig, TransformerLM]):
    def make_model(self, generator: torch.Generator) -> TransformerLM:
        config = self.config
        words, shape = self.data.tokenizer.vocab_size, config.model.model_dump()
        return TransformerLM(TransformerShape(vocab_size=words, context=config.length, **shape), generator)

    def make_batches(self, split: str) -> ChunkBatches:
        config, training = self.config, split == "train"
        return ChunkBatches(
            self.data.tokens[split], config.batch_size, config.length, shuffle=training, drop_last=False,
            seed=config.train.seed,
        )  # fmt: skip

    def score(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        return self.model.log_likelihood(tokens, self.data.tokenizer.eos_id), None

    def keep(self, folder: Path) -> None:
        save_teacher(folder, self.model, self.data.tokenizer)
