"""Treat Ctrl-C and SIGTERM as a request to stop at the next step, so that the run is saved first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hmmlm.distributed.ranks import world


class Stopped(Exception):
    """The exception that ends long work early to return to the training loop, which saves."""


class StopRequest:
    """A flag: whether the user asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def raise_if_asked(self) -> None:
        """Raise `Stopped` if some process of the run was asked to stop; all of them call this at the same steps."""
        if world().any(self.asked):
            raise Stopped

    def raise_if_alone(self) -> None:
        """Raise `Stopped` if the only process of the run was asked to stop; for work that processes do not share."""
        if world().count == 1:
            self.raise_if_asked()


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Let the first signal set the request, and the second act as usual. Only in the main thread."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: FrameType | None) -> None:
        request.asked = True
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
