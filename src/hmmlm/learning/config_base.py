"""What every section of a configuration shares."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1, both included."""
Momentum = Annotated[float, Field(ge=0, lt=1)]
"""A number from 0 to 1, 1 excluded."""


class Section(BaseModel):
    """Frozen, no unknown fields, no NaN: what every part of the configuration shares."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)
