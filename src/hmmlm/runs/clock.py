"""The clock of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """A clock of the seconds of a run over all its processes, and of the speed of its steps alone."""

    def __init__(self, before: float) -> None:
        self.began = time.perf_counter() - before
        self.marked, self.pause = self.seconds, 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = self.seconds
        try:
            yield
        finally:
            self.pause += self.seconds - began

    def speed(self, amount: int) -> float:
        """Return the amount per second since the last call."""
        elapsed = self.seconds - self.marked - self.pause
        self.marked, self.pause = self.seconds, 0.0
        return amount / max(elapsed, 1e-9)
