"""The base of every section of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1, both included."""
Momentum = Annotated[float, Field(ge=0, lt=1)]
"""A number from 0 to 1, 1 excluded."""


class Section(BaseModel):
    """Frozen, without unknown fields or NaN; the docstring under a field is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, use_attribute_docstrings=True
    )
