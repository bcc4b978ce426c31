"""The budget of a construction: whatever builds an automaton counts its steps, and is refused beyond them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from hmmlm.errors import InputError

STEPS = 400_000_000
"""The most steps of a construction, of a few nanoseconds each: seconds on one core."""
SLOW = 256  # steps of an operation on a Python object


class Budget:
    """The steps of one construction."""

    steps = 0


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def construction() -> Iterator[Budget]:
    """Count all steps inside as those of one construction, or of the one that this is a part of."""
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    token = _current.set(budget := Budget())
    try:
        yield budget
    finally:
        _current.reset(token)


def spend(steps: int, remedy: str = "use smaller repeats, or fewer and shorter phrases") -> None:
    """Count steps that are about to be made; raise an InputError if the construction has no more."""
    budget = _current.get()
    if budget is not None:
        budget.steps += steps
        if budget.steps > STEPS:
            raise InputError(f"the constraint needs more than {STEPS:,} steps to compile: {remedy}")
