"""The base of every section of a configuration."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1, both included."""
Momentum = Annotated[float, Field(ge=0, lt=1)]
"""A number from 0 to 1, 1 excluded."""
MAX_TOKENS = 10**12
"""More tokens than any text has: what counts tokens, or occurrences of a word, is at most this."""
TokenCount = Annotated[int, Field(gt=0, le=MAX_TOKENS)]
MAX_VOCABULARY = 2**24
"""More words than any language has; a model of two states and as many words takes a gigabyte to train."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""What a generator accepts, and still does after one seed per sample is added."""
States = Annotated[int, Field(gt=0, le=2**22)]
"""16 times the largest model trained so far; how many fit in memory depends on the family (`check_memory`)."""
Width = Annotated[int, Field(gt=0, le=2**16)]
"""Width of a network: a single square layer of the largest takes 64 GB to train."""
Layers = Annotated[int, Field(gt=0, le=1_000)]
"""Layers of a network."""
Negatives = Annotated[int, Field(ge=0, le=MAX_VOCABULARY)]
"""Words that represent others in a softmax; 0: no such words, the softmax is exact."""
Passes = Annotated[int, Field(ge=0, le=1_000)]
"""Passes over words or embeddings that end early if nothing changes."""
Pseudocount = Annotated[float, Field(ge=0, le=1e6)]
"""A count added to every count: the largest makes every distribution uniform."""
Scale = Annotated[float, Field(ge=0, le=100)]
"""Standard deviation of logits: at the largest, every initial distribution is a single outcome."""


DeviceCount = Annotated[int, Field(gt=0, le=1_024)]
"""Processes of one machine."""
MAX_THREADS = 1_024
"""CPU threads; far more than this end the process."""


class Section(BaseModel):
    """Frozen, without unknown fields or NaN; the docstring under a field is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, use_attribute_docstrings=True
    )


class ModelSize(NamedTuple):
    """Numbers that training holds at least, to refuse what cannot fit in memory before it is allocated."""

    parameters: int
    probabilities: int
    """Of the HMM that a step or a validation check makes, as far as it is held as a whole."""
