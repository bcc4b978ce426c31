"""Next-word distillation: the HMM also learns to predict the words that a neural language model expects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from hmmlm.section import Fraction, Section

DrawnWords = Annotated[int, Field(gt=0, le=1_024)]


class NextWordsConfig(Section):
    """Words drawn from a teacher's prediction at every position of the training text."""

    teacher: Path | None = None
    """A run of `hmmlm baseline` on the same tokens; None: train on the words of the text alone."""
    weight: Fraction = 0.5
    """Weight of the teacher's words in the objective; the words of the text have 1 − weight."""
    samples: DrawnWords = 2
    """Words per position in each step, out of those drawn."""
    drawn: DrawnWords = 32
    """Words per position that the teacher draws once, before training; each takes 2 or 4 bytes on the disk."""
