"""The training of a neural baseline, as configured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from hmmlm.learning.config import Section
from hmmlm.learning.config_base import Fraction, Momentum
from hmmlm.learning.config_network import NetworkConfig, saved_network_config


class BaselineModelConfig(Section):
    """The network."""

    kind: Literal["feedforward", "lstm"] = "lstm"
    """feedforward: reads the last `order` − 1 words; lstm: reads all of them."""
    hidden: PositiveInt = 256
    """Size of word vectors and layers."""
    layers: PositiveInt = 2
    """Layers between word vectors and the prediction."""
    order: Annotated[int, Field(ge=2)] = 5
    """Words of an n-gram, the predicted one included (feedforward)."""
    dropout: Fraction = 0.3
    """Of word vectors and of what each layer gives."""

    @model_validator(mode="after")
    def _order_is_used(self) -> BaselineModelConfig:
        if self.kind == "lstm" and self.order != type(self).model_fields["order"].default:
            raise ValueError("order is for kind = 'feedforward': an LSTM reads all words, leave it out")
        return self


class BaselineConfig(NetworkConfig):
    """Everything the training of a baseline needs to be done again."""

    model: BaselineModelConfig = BaselineModelConfig()
    length: PositiveInt = 32
    """Tokens of a window; what was read before it is carried on."""
    batch_size: PositiveInt = 16
    """Streams side by side, into which the text is cut."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """How much of the mean and of the mean square of gradients is kept a step. In so small batches most words do not
    occur: where the square forgets that they do, they are pushed down too far in between."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, on matrices."""


def saved_baseline_config(out: Path) -> BaselineConfig:
    """The configuration of the run in `out`."""
    return saved_network_config(BaselineConfig, out, "hmmlm baseline")
