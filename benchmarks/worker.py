"""One process per system: a crash, a hang or a lack of memory affects no other, and idle processes cost nothing."""

import importlib
import os
import resource
import time
import traceback
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks import problem as problems
from benchmarks.peers import SYSTEMS, Task

# Messages of torch and jax about failed allocations.
NO_MEMORY = ("can't allocate", "out of memory", "resource_exhausted", "ynnpack operation failed")


class TooSlow(Exception):
    """No answer within the time limit."""


class Failed(Exception):
    """An error of the system or the death of its process; the message gives the reason."""


def serve(connection: Connection, system: str, memory: int) -> None:
    """Serve requests until the pipe closes: import, (load, Z), (prepare, operation), first, (visit, seconds)."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    peer: Any = None
    tasks: dict[str, Any] = {}
    task: Task | None = None
    while True:
        try:
            request, *arguments = connection.recv()
        except EOFError:
            return
        try:
            answer: Any = None
            if request == "import":
                peer = importlib.import_module(f"benchmarks.peers.{SYSTEMS[system]}")
                answer = peer.VERSION, peer.DTYPE
            elif request == "load":
                task = None
                tasks.clear()  # frees the arrays of the previous size
                tasks.update(peer.tasks(problems.make(*arguments)))
                answer = list(tasks)
            elif request == "prepare":
                task = tasks[arguments[0]]()
            elif request == "first":
                assert task is not None
                began = time.perf_counter()
                outcome = task.run()
                seconds = time.perf_counter() - began
                answer = seconds, None if task.result is None else np.array(task.result(outcome))
            elif request == "visit":
                assert task is not None
                answer = visit(task, *arguments)
            connection.send(("done", answer))
        except MemoryError:
            connection.send(("failed", "out of memory"))
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            no_memory = any(sign in text.lower() for sign in NO_MEMORY)
            if not no_memory:
                traceback.print_exc()
            connection.send(("failed", "out of memory" if no_memory else text))


def visit(task: Task, seconds: float) -> list[float]:
    """Run the task repeatedly for at least `seconds` and return the time of each run."""
    times: list[float] = []
    while sum(times) < seconds:
        began = time.perf_counter()
        task.run()
        times.append(time.perf_counter() - began)
    return times


class Worker:
    """Parent's handle of one system's process, which starts on the first request and restarts if it was lost."""

    def __init__(self, system: str, memory: int) -> None:
        self.system, self.memory = system, memory
        self.connection: Connection | None = None
        self.process: Any = None
        self.about: tuple[str, str] = ("", "")
        self.states = 0

    def ask(self, *request: Any, limit: float = 120.0) -> Any:
        """Send a request and return its answer; raise TooSlow after `limit` seconds, Failed on an error."""
        if self.connection is None:
            context = get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=serve, args=(theirs, self.system, self.memory), daemon=True)
            self.process.start()
            theirs.close()
        try:
            self.connection.send(request)
            if not self.connection.poll(limit):
                self.stop()
                raise TooSlow
            kind, answer = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            self.stop()
            # Without memory, allocators abort and the kernel kills the process.
            raise Failed("out of memory" if code in (-6, -9, -11) else f"process ended with code {code}") from None
        if kind == "failed":
            self.stop()  # threads of the failed computation may still be running
            raise Failed(answer)
        return answer

    def load(self, states: int) -> list[str]:
        """Load the problem of a size if needed, and return the operations that the system offers."""
        if self.connection is None or self.states != states:
            self.about = self.ask("import")
            self.offered: list[str] = self.ask("load", states)
            self.states = states
        return self.offered

    def stop(self) -> None:
        """Kill the process and close the pipe."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
        if self.connection is not None:
            self.connection.close()
        self.connection = self.process = None
        self.states = 0


def share_cores(threads: int) -> None:
    """Give all systems started from this process the same CPU cores and number of threads, and no GPU."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    for library in ("OMP", "MKL", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = str(threads)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
