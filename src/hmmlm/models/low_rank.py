"""A transition of low rank: a logit per probability of two factors (Chiu, Deng & Rush 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from hmmlm.data.tokenizers import Tokenizer
from hmmlm.hmm import HMM
from hmmlm.models.base import Model, ModelConfig, TableModel
from hmmlm.section import ModelSize, Scale, States
from hmmlm.transitions import LowRank


class LowRankConfig(ModelConfig):
    """Transitions through `rank` classes: a state chooses a class, which chooses the next state."""

    kind: Literal["low-rank"] = "low-rank"
    rank: States | None = None
    """Number of classes; None: an eighth of the states."""
    scale: Scale = 1.0
    """Standard deviation of the initial logits."""

    optimizer_defaults: ClassVar[dict[str, Any]] = {"lr": 1.0, "eps": 3e-5, "weight_decay": 0.0}

    @model_validator(mode="after")
    def _rank_is_low(self) -> LowRankConfig:
        if self.rank is not None and self.rank > self.num_states:
            raise ValueError(f"rank ({self.rank}) must be at most states ({self.num_states})")
        return self

    @property
    def classes(self) -> int:
        """The rank that is used."""
        return self.rank or max(1, self.num_states // 8)

    @property
    def counts_suffice(self) -> bool:
        return True

    def size(self, words: int) -> ModelSize:
        entries = self.num_states * (2 * self.classes + words)
        return ModelSize(entries, entries)

    def build(self, vocabulary: Tokenizer, block_of_word: Tensor | None, seed: int, device: torch.device) -> Model:
        generator = torch.Generator().manual_seed(seed)
        return LowRankModel(self.num_states, self.classes, vocabulary.vocab_size, self.scale, generator)


class LowRankModel(TableModel):
    """Logits start [Z], left [Z, R], right [R, Z] and emission [Z, V]."""

    graphable = False  # the scan looks at its results

    def __init__(
        self, states: int, rank: int, vocab_size: int, scale: float = 1.0, generator: torch.Generator | None = None
    ) -> None:
        shapes = {"start": (states,), "left": (states, rank), "right": (rank, states), "emission": (states, vocab_size)}
        super().__init__(vocab_size, shapes, scale, generator)

    def make_hmm(self, log_probs: Mapping[str, Tensor]) -> HMM:
        return HMM(log_probs["start"], LowRank(log_probs["left"], log_probs["right"]), log_probs["emission"])
