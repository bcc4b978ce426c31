"""For the tests of teachers and baselines that are trained here: a text to learn, and a run that is stopped."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from hmmlm.learning.network import NetworkTrainer


def write_pairs(folder: Path) -> Path:
    """After each first word comes one second word only: 8 first words, so perplexity 8^(1/3) = 2 a token at best."""
    path = folder / "pairs.txt"
    generator = np.random.default_rng(0)
    path.write_text("".join(f"a{i} b{i}\n" for i in generator.integers(0, 8, 600)), encoding="utf-8")
    return path


def interrupt_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the user pressed Ctrl-C when a run has done so many steps."""
    step = NetworkTrainer.step

    def interrupted(self: NetworkTrainer, *arguments: object) -> None:
        step(self, *arguments)  # type: ignore[arg-type]
        if self.position.step == steps:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(NetworkTrainer, "step", interrupted)
