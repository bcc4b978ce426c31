"""Progress: a live display on a terminal, plain lines elsewhere, silent from Python unless requested."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as RichDisplay
from rich.text import Text

from hmmlm.terminal import printable

LINE_EVERY_S = 15.0
"""Seconds between two plain lines of one phase."""
FIRST_LINE_S = 3.0
"""Seconds until the first one."""
PACE_S = 1.0
"""Seconds over which a rate is measured, at least; two in a row that differ by at most a factor of two are steady."""
LARGEST = 1e7
"""Perplexities from here on are written as powers of ten: no vocabulary is as large."""


class Pace:
    """The rate of a phase in its last seconds: its first steps, which compile and load, predict nothing."""

    def __init__(self) -> None:
        self.began, self.count = time.monotonic(), 0
        self.rates: list[float] = []

    def advance(self, amount: int) -> None:
        self.count += amount
        seconds = time.monotonic() - self.began
        if seconds >= PACE_S:
            self.rates = [*self.rates[-1:], self.count / seconds]
            self.began, self.count = time.monotonic(), 0

    def seconds_for(self, amount: float) -> float | None:
        """Return the time that `amount` more will take; None while the rate is not steady."""
        steady = len(self.rates) == 2 and max(self.rates) <= 2 * min(self.rates) > 0
        return 2 * amount / sum(self.rates) if steady else None


class ProgressPhase:
    """A part of a run with a known or unknown amount of work; the base class shows nothing."""

    def advance(self, amount: int, **figures: str) -> None:
        """Report progress; figures (loss=…, valid=…) are shown until they are given again."""


class Progress:
    """A display of phases and notes; the base class is silent."""

    @contextmanager
    def phase(
        self, name: str, total: int | None = None, unit: str = "tokens", done: int = 0
    ) -> Iterator[ProgressPhase]:
        """Show a phase of `total` units, `done` of them already done; phases may be nested."""
        yield ProgressPhase()

    def note(self, line: str) -> None:
        """Show a line permanently."""


def terminal_progress() -> Progress:
    """Return the display for standard output: live on a terminal, lines in a file or a pipe."""
    return LiveProgress() if sys.stdout.isatty() else LineProgress()


class LineProgress(Progress):
    """A display that prints a line when a phase ends, and regularly during long ones; short nested ones are silent."""

    def __init__(self) -> None:
        self.depth = 0

    @contextmanager
    def phase(
        self, name: str, total: int | None = None, unit: str = "tokens", done: int = 0
    ) -> Iterator[ProgressPhase]:
        phase = _LinePhase(name, total, unit, done)
        phase.wait = LINE_EVERY_S if self.depth else FIRST_LINE_S
        self.depth += 1
        try:
            yield phase
        finally:
            self.depth -= 1
        if self.depth == 0 and (phase.total or phase.done):  # otherwise nothing was counted
            phase.line()

    def note(self, line: str) -> None:
        print(printable(line), flush=True)


class _LinePhase(ProgressPhase):
    def __init__(self, name: str, total: int | None, unit: str, done: int) -> None:
        self.name, self.total, self.unit, self.done, self.before = name, total, unit, done, done
        self.began = self.shown = time.monotonic()
        self.wait = LINE_EVERY_S  # seconds until the next line
        self.pace = Pace()
        self.figures: dict[str, str] = {}

    def advance(self, amount: int, **figures: str) -> None:
        self.done += amount
        self.pace.advance(amount)
        self.figures |= figures
        if time.monotonic() - self.shown > self.wait:
            self.line()

    def line(self) -> None:
        self.shown, self.wait = time.monotonic(), LINE_EVERY_S
        rate = (self.done - self.before) / max(1e-9, self.shown - self.began)
        done = f"{self.done:,}" + (f" of {self.total:,}" if self.total else "")
        parts = [f"{done} {self.unit}", f"{rate:,.0f} {self.unit}/s"]
        left = self.pace.seconds_for(self.total - self.done) if self.total else None
        if left:
            parts.append(f"{_clock(left)} left")
        parts += [f"{name} {value}" for name, value in self.figures.items()]
        print(f"{self.name}: {', '.join(parts)}", flush=True)


class LiveProgress(Progress):
    """A display of bars with units per second and remaining time; a bar disappears with its phase, notes remain."""

    def __init__(self, console: Console | None = None) -> None:
        self.display = RichDisplay(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            _RateColumn(),
            _TimeLeftColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        self.depth = 0

    @contextmanager
    def phase(
        self, name: str, total: int | None = None, unit: str = "tokens", done: int = 0
    ) -> Iterator[ProgressPhase]:
        if self.depth == 0:
            self.display.start()
        self.depth += 1
        pace = Pace()
        task = self.display.add_task(name, total=total, completed=done, unit=unit, figures="", pace=pace)
        try:
            yield _LivePhase(self.display, task, pace)
        finally:
            self.display.remove_task(task)
            self.depth -= 1
            if self.depth == 0:
                self.display.stop()

    def note(self, line: str) -> None:
        self.display.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


class _LivePhase(ProgressPhase):
    def __init__(self, display: RichDisplay, task: TaskID, pace: Pace) -> None:
        self.display, self.task, self.pace = display, task, pace
        self.figures: dict[str, str] = {}

    def advance(self, amount: int, **figures: str) -> None:
        self.pace.advance(amount)
        if figures:
            self.figures |= figures
            shown = "  ".join(f"{name} {value}" for name, value in self.figures.items())
            self.display.update(self.task, advance=amount, figures=shown)
        else:
            self.display.advance(self.task, amount)


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} {task.fields['unit']}/s" if speed else "", style="progress.data.speed")


class _TimeLeftColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        left = None if task.remaining is None else task.fields["pace"].seconds_for(task.remaining)
        return Text("-:--" if left is None else _clock(left), style="progress.remaining")


def perplexity_text(perplexity: float, digits: int = 1) -> str:
    """Format a perplexity: 1,234.5, but 1.3e54 where more digits are meaningless."""
    if not LARGEST <= perplexity < math.inf:
        return f"{perplexity:,.{digits}f}"
    mantissa, exponent = f"{perplexity:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _clock(seconds: float) -> str:
    """Format a duration as h:mm:ss or m:ss."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
