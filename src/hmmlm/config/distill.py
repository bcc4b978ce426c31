"""The configuration of a distillation: which language model, how much of it is sampled, and the size of the HMM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from hmmlm.config.renames import present_sections
from hmmlm.section import Section, Seed, States, TokenCount


class Amount(NamedTuple):
    """What a device can do in the time of a distillation."""

    tokens: int
    """Sampled."""
    num_states: int
    epochs: int


AMOUNTS = {"cpu": Amount(400_000, 512, 6), "cuda": Amount(10_000_000, 4_096, 6)}
"""Defaults by device: ten minutes on two cores for 15M parameters, twenty on one GPU for 1B."""


class DistillConfig(Section):
    """A causal language model, and the size of the HMM that is distilled from it."""

    model: str
    """A Hugging Face folder, a name on the hub, or a GGUF file."""
    gguf_file: str | None = None
    """The file in the model's folder or hub repository, if it is a GGUF."""
    prompts: Path | None = None
    """A file of prompts, one per line, of which every text continues one; the HMM is trained on what follows the
    prompt. None: texts begin with the model's beginning-of-text token."""
    tokens: TokenCount | None = None
    """Tokens to sample, 10% of them held out. None: 400,000 on the CPU, 10 million on a GPU."""
    length: Annotated[int, Field(ge=2, le=1 << 20)] | None = None
    """Maximum number of tokens of a text, prompt excluded. None: 256, or as many as the model's context has room
    for."""
    num_states: States | None = None
    """Hidden states. None: 512 on the CPU, 4,096 on a GPU."""
    epochs: Annotated[int, Field(gt=0, le=1_000_000)] | None = None
    """Passes over the samples. None: 6."""
    minutes: Annotated[float, Field(gt=0, le=1e5)] | None = None
    """Choose the tokens and the states that are not given, so that the distillation takes about this long."""
    seed: Seed = 0
    """Seed of the samples and of training."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""

    @model_validator(mode="before")
    @classmethod
    def _present_names(cls, values: Any) -> Any:
        return present_sections(values) if isinstance(values, Mapping) else values

    def resolve(self, device: str) -> DistillConfig:
        """Return the configuration with the defaults of a type of device."""
        amount = AMOUNTS[device]._asdict()
        given = {name: getattr(self, name) or value for name, value in amount.items()}
        return self.model_copy(update=given)
