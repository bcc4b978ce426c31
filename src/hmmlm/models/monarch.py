"""A Monarch transition: a logit per probability of two block-diagonal factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from hmmlm.data.tokenizers import Tokenizer
from hmmlm.hmm import HMM
from hmmlm.models.base import Model, ModelConfig, TableModel
from hmmlm.section import ModelSize, Scale, States
from hmmlm.transitions import Monarch


class MonarchConfig(ModelConfig):
    """Transitions in two steps: within a group of states, then from that place to a group."""

    kind: Literal["monarch"] = "monarch"
    groups: States | None = None
    """Groups of states, a divisor of their number; None: the largest one up to the square root."""
    scale: Scale = 1.0
    """Standard deviation of the initial logits."""

    optimizer_defaults: ClassVar[dict[str, Any]] = {"lr": 1.0, "eps": 3e-5, "weight_decay": 0.0}

    @model_validator(mode="after")
    def _groups_divide_states(self) -> MonarchConfig:
        if self.groups is not None and self.num_states % self.groups:
            raise ValueError(f"states ({self.num_states}) must be a multiple of groups ({self.groups})")
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """The number of groups, and of states of a group."""
        root = math.isqrt(self.num_states)
        groups = self.groups or next(a for a in range(root, 0, -1) if self.num_states % a == 0)
        return groups, self.num_states // groups

    @property
    def counts_suffice(self) -> bool:
        return True

    def size(self, words: int) -> ModelSize:
        entries = self.num_states * (sum(self.shape) + words)
        return ModelSize(entries, entries)

    def build(self, vocabulary: Tokenizer, block_of_word: Tensor | None, seed: int, device: torch.device) -> Model:
        return MonarchModel(*self.shape, vocabulary.vocab_size, self.scale, torch.Generator().manual_seed(seed))


class MonarchModel(TableModel):
    """Logits start [Z], left [a, b, b], right [b, a, a] and emission [Z, V], for a groups of b states."""

    graphable = False  # the scan looks at its results

    def __init__(
        self, groups: int, width: int, vocab_size: int, scale: float = 1.0, generator: torch.Generator | None = None
    ) -> None:
        states = groups * width
        shapes = {
            "start": (states,),
            "left": (groups, width, width),
            "right": (width, groups, groups),
            "emission": (states, vocab_size),
        }
        super().__init__(vocab_size, shapes, scale, generator)

    def make_hmm(self, log_probs: Mapping[str, Tensor]) -> HMM:
        return HMM(log_probs["start"], Monarch(log_probs["left"], log_probs["right"]), log_probs["emission"])
