"""The model family whose network is a pretrained language model (Lee & Berg-Kirkpatrick 2025, section 5)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hmmlm.data.tokenizers import Tokenizer
from hmmlm.distillation.transfer import from_pretrained, word_vectors
from hmmlm.models.base import Model, ModelConfig
from hmmlm.section import Fraction
from hmmlm.teachers.teacher import check_teacher, open_teacher


class PretrainedConfig(ModelConfig):
    """Low-rank factors from the network of a pretrained language model over the sequence of states."""

    kind: Literal["pretrained"] = "pretrained"
    teacher: str
    """The language model: a folder, a hub name, a GGUF file, or a run of `hmmlm teacher`."""
    gguf_file: str | None = None
    """The file in its folder or hub repository, if it is a GGUF."""
    weights: Literal["all", "body", "random"] = "all"
    """all: the blocks, and the head as word embeddings; body: the blocks only; random: random weights of its shape."""
    max_initial_similarity: Fraction = 0.2
    """Maximum initial similarity of the network's outputs across states; 1 disables the rescaling."""

    # Suits networks of 1B parameters; smaller ones train with higher rates (docs/reproduction/results.md).
    optimizer_defaults: ClassVar[dict[str, Any]] = {"lr": 0.0001, "weight_decay": 0.1}

    @property
    def has_embeddings(self) -> bool:
        return True

    @property
    def factor_emission(self) -> bool:
        return True

    def check_files(self) -> None:
        check_teacher(self.teacher, random=self.weights == "random", gguf_file=self.gguf_file)

    def build(self, vocabulary: Tokenizer, block_of_word: Tensor | None, seed: int, device: torch.device) -> Model:
        with torch.random.fork_rng(devices=[]):  # a resumed run opens it at another moment, and must draw the same
            network = open_teacher(
                self.teacher, random=self.weights == "random", gguf_file=self.gguf_file, device="cpu", seed=seed
            )
        words = word_vectors(network, vocabulary) if self.weights == "all" else None
        generator = torch.Generator().manual_seed(seed)
        return from_pretrained(
            network, self.num_states, vocabulary.vocab_size, generator, words, self.max_initial_similarity, device
        )
