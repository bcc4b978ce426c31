"""Configurations of the neural baselines, without torch (see `hmmlm.models.config`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from hmmlm.models.config import ModelSize
from hmmlm.section import Fraction, Layers, Section, Width

if TYPE_CHECKING:
    import torch

    from hmmlm.baselines.neural import NeuralBaseline
    from hmmlm.data.tokenizers import Tokenizer


class BaselineModelConfig(Section, ABC):
    """A neural baseline."""

    hidden: Width = 256
    """Size of word embeddings and layers."""
    layers: Layers = 2
    """Layers between word embeddings and the prediction."""
    dropout: Fraction = 0.3
    """Dropout of word embeddings and of each layer's output."""

    def size(self, words: int) -> ModelSize:
        """Return a lower bound of what training holds (see `ModelConfig.size`)."""
        return ModelSize((words + self.layers * self.hidden) * self.hidden, 0)

    @abstractmethod
    def build(self, vocabulary: Tokenizer, length: int, generator: torch.Generator | None) -> NeuralBaseline:
        """Create the network."""


class FeedForwardConfig(BaselineModelConfig):
    """A feed-forward network on the last words."""

    kind: Literal["feedforward"] = "feedforward"
    order: Annotated[int, Field(ge=2, le=100)] = 5
    """Words of an n-gram, the predicted one included."""

    def build(self, vocabulary: Tokenizer, length: int, generator: torch.Generator | None) -> NeuralBaseline:
        from hmmlm.baselines.neural import FeedForward

        return FeedForward(self, vocabulary, generator)


class LstmConfig(BaselineModelConfig):
    """An LSTM over all previous words."""

    kind: Literal["lstm"] = "lstm"

    def build(self, vocabulary: Tokenizer, length: int, generator: torch.Generator | None) -> NeuralBaseline:
        from hmmlm.baselines.neural import Lstm

        return Lstm(self, vocabulary, generator)
