"""Runs of teachers and baselines: a text to learn, and a run that is stopped."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from hmmlm.data.batches import Batch
from hmmlm.learning.fit import Fit


def write_pairs(folder: Path) -> Path:
    """Write lines of two words, of which the first determines the second.

    There are 8 first words, so the lowest perplexity is 8^(1/3) = 2 per token.
    """
    path = folder / "pairs.txt"
    generator = np.random.default_rng(0)
    path.write_text("".join(f"a{i} b{i}\n" for i in generator.integers(0, 8, 600)), encoding="utf-8")
    return path


def interrupt_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGINT, as Ctrl-C does, when a run has done this many steps."""
    step = Fit.step

    def interrupted(self: Fit, batch: Batch) -> None:
        step(self, batch)
        if self.position.step == steps:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Fit, "step", interrupted)
