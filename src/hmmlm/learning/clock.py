"""How long a run has taken."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds of a run over all its processes, and the speed of its steps without what is done between them."""

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
        """Amount a second since the last call."""
        elapsed = self.seconds - self.marked - self.pause
        self.marked, self.pause = self.seconds, 0.0
        return amount / max(elapsed, 1e-9)
