"""Configuration of the teacher that `hmmlm teacher` trains, without torch (see `hmmlm.models.config`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from hmmlm.errors import InputError
from hmmlm.models.config import ModelSize
from hmmlm.section import Layers, Section, Width

if TYPE_CHECKING:
    import torch

    from hmmlm.data.tokenizers import Tokenizer
    from hmmlm.teachers.gpt import GPT


class GPTConfig(Section):
    """A small decoder-only transformer."""

    hidden: Width = 256
    """Width."""
    layers: Layers = 4
    """Blocks of attention and an MLP."""
    heads: Annotated[int, Field(gt=0, le=1_024)] = 4
    """Attention heads per block."""

    @model_validator(mode="after")
    def _heads_fit(self) -> GPTConfig:
        GPTShape(vocab_size=1, context=1, **self.model_dump())
        return self

    def size(self, words: int) -> ModelSize:
        """Return a lower bound of what training holds (see `ModelConfig.size`)."""
        return ModelSize((words + self.layers * 12 * self.hidden) * self.hidden, 0)

    def build(self, vocabulary: Tokenizer, length: int, generator: torch.Generator | None) -> GPT:
        """Create the network; `length` is its longest context."""
        from hmmlm.teachers.gpt import GPT

        shape = GPTShape(vocab_size=vocabulary.vocab_size, context=length, **self.model_dump())
        return GPT(shape, vocabulary.eos_id, generator)


@dataclass(frozen=True)
class GPTShape:
    """Sizes of a GPT; `context` is the chunk length it is trained on."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or value < 1:
                raise InputError(f"the teacher's {name} is {value!r}: it must be an integer of at least 1")
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise InputError(
                f"hidden ({self.hidden}) must be a multiple of twice the heads ({self.heads}): rotary positions rotate "
                "pairs of dimensions of each head"
            )
