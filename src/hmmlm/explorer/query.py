"""The base of requests: every field has bounds, and nothing else is accepted."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_CHARACTERS = 10_000
Text = Annotated[str, Field(max_length=MAX_CHARACTERS)]
Count = Annotated[int, Field(ge=1, le=100)]


class Query(BaseModel):
    """A request of a panel, from JSON."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
