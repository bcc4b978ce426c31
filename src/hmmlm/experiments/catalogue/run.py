"""A run of a study."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BASELINE = "baseline"
"""In place of a recipe: a run of `hmmlm baseline`."""


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    row: str
    """The paper's row or point, with the data set."""
    recipe: str
    settings: dict[str, Any] = field(default_factory=dict)
    """What differs from the recipe."""
    seed: int = 0
    paper: dict[str, float] = field(default_factory=dict)
    """The paper's metrics for it, where it prints them."""
