"""The signs of life of the processes of a run, so that one that ends or hangs stops the others, and is named.

Every process counts up its own number in a store that rank 0 serves. A number that does not change for `SILENCE_S`
seconds, or a store that does not answer, is a lost process.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

BEAT_S = 1.0
SILENCE_S = 20.0
"""Seconds after which a silent process is lost. It can also be computing without letting other threads run."""
LEFT, LOST = "left", "lost"
"""How a process ended that is not to blame: as the others, or because another was lost."""


class Heartbeat:
    """The signs of life of this process, and what it knows about the others'."""

    def __init__(self, rank: int, count: int, address: str, port: int) -> None:
        """Connect to the store at `address`, or serve it in rank 0, on a free port if `port` is 0."""
        self.rank, self.count = rank, count
        timeout = timedelta(seconds=SILENCE_S)
        self.store = dist.TCPStore(address, port, is_master=rank == 0, wait_for_workers=False, timeout=timeout)
        self.store.set(f"name/{rank}", f"process {os.getpid()} on {socket.gethostname()}")
        self.store.set(f"beat/{rank}", "0")
        self.stopped = threading.Event()
        self.beats: dict[int, tuple[bytes, float]] = {}
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start to beat and to watch; every process must have its heartbeat by now."""
        self.thread.start()

    def stop(self, how: str) -> None:
        """Stop beating; `how` is LEFT, LOST, or the error that ended this process."""
        self.stopped.set()
        try:
            self.store.set(f"end/{self.rank}", how)
        except RuntimeError:  # of rank 0, which is gone
            return
        self.thread.join(timeout=2 * BEAT_S)

    def find_lost(self) -> str | None:
        """Wait until a lost process is known, and return a sentence about it; None if all are well."""
        deadline = time.monotonic() + SILENCE_S + 5 * BEAT_S
        while time.monotonic() < deadline:
            found = self._lost()
            if found is not None:
                return found
            time.sleep(BEAT_S / 4)
        return None

    def _run(self) -> None:
        number = 0
        while not self.stopped.wait(BEAT_S):
            number += 1
            with suppress(RuntimeError):  # found below
                self.store.set(f"beat/{self.rank}", str(number))
            found = self._lost()
            # The main thread may be waiting for the lost process forever. If it is not, it reports the error itself.
            if found is not None and not self.stopped.wait(2 * BEAT_S):
                print(f"hmmlm: error: {found}", file=sys.stderr, flush=True)
                os._exit(2)

    def _lost(self) -> str | None:
        """Return a sentence about a process that has failed or is silent, if there is one."""
        others = [rank for rank in range(self.count) if rank != self.rank]
        try:
            ended = {rank for rank in others if self.store.check([f"end/{rank}"])}
            for rank in ended:
                how = self.store.get(f"end/{rank}").decode()
                if how not in (LEFT, LOST):
                    return f"rank {rank} of {self.count} failed: {how}"
            for rank in (rank for rank in others if rank not in ended):
                beat, now = self.store.get(f"beat/{rank}"), time.monotonic()
                last, since = self.beats.get(rank, (b"", now))
                self.beats[rank] = (beat, now if beat != last else since)
                if now - self.beats[rank][1] > SILENCE_S:
                    name = self.store.get(f"name/{rank}").decode()
                    return f"rank {rank} of {self.count} ({name}) was lost: no sign of life in {SILENCE_S:.0f} s"
        except RuntimeError:
            return f"rank 0 of {self.count} was lost: it no longer answers"
        return None
