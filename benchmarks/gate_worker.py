"""Measure rows in one tree: what `benchmarks.gate` runs, with PYTHONPATH of that tree, which may be an older one.

Requests and answers are lines of JSON on standard input and output, one answer for each request. To import torch takes
seconds, so a row's process is forked from one that has, and talks in its place until it ends. The parent computes with
one thread and never on a GPU: threads of OpenMP and contexts of CUDA do not survive a fork.

What a tree offers for this, beside `hmmlm`. Keep these names, or teach this file the old and the new ones:

- `benchmarks.speed`: `ROWS`, `shrink(row)`, `make_steps(row, options, fabric)`, whose result has `run(steps)`
- `benchmarks.control`: `WORDS`, `END`, `random_model(states, device)`, `anything(words)`, `containing(phrase, words)`,
  the `&` and `until(end)` of automata, `Guide(hmm, automaton, length)`, `Steering(guide, guide.begin())(ids, scores)`
- `benchmarks.text`: `WORDS`, `measurements()`, `dense_model(states)`, `blocked_model(states, blocks)`
- `benchmarks.problem`: `OPERATIONS`, `make(states)`; `benchmarks.peers.ours`: `tasks(problem)`
- `hmmlm.HMM` and what `blocked_model` returns: the methods of `QUERIES`; a row is left out where there is none
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Run = Callable[[int], tuple[float, int]]  # a number of calls → their seconds, and the units of work that they did
Makers = dict[str, Callable[[], Run]]  # by row: what prepares it

THREADS = 2
WARM_UP = 0.3  # seconds, or one call
ANSWERED = 3  # exit code of a process that has answered the last request, which its parent does otherwise
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # options of glibc's mallopt
NO_HUGE_PAGES = 41  # option of Linux's prctl
SMALL, LARGE = 2**17, 2**25  # bytes: least and largest value of the second, between which glibc moves it

SIZES = (16, 64, 256, 1024)  # states, beside other libraries
CELLS = {"cpu": ((64, 256, 1024), (3,)), "cuda": ((64, 256, 1024, 4096), (1, 3))}  # of steering: states, phrases
BATCHES = (16, 1)  # rows of a call of steering
LENGTH, STEPS, SKIPPED = 40, 30, 2  # of a guide; calls for a text; the first ones, which are not timed
MODELS: dict[str, tuple[str, tuple[int, ...], int, int]] = {  # a function of `text`, its arguments; the batch's B, T
    "dense, 64 states": ("dense_model", (64,), 32, 64),
    "dense, 512 states": ("dense_model", (512,), 16, 32),
    "blocked, 2048 states": ("blocked_model", (2048, 32), 8, 16),
}
WHOLE = ("log_likelihood", "filter", "token_log_probs", "expected_counts", "posterior", "viterbi", "entropy")
QUERIES: dict[str, Callable[..., Any]] = {  # of a model, ragged tokens [B, T], lengths [B]
    **{name: lambda hmm, *batch, name=name: getattr(hmm, name)(*batch) for name in (*WHOLE, "next_token")},
    "posterior_sample": lambda hmm, *batch: hmm.posterior_sample(*batch, 4),
    "predictions": lambda hmm, *batch: [None for _ in hmm.predictions(*eighth(batch))],
    "infill": lambda hmm, *batch: hmm.infill(*eighth(batch)),
    "infill_at": lambda hmm, tokens, _: hmm.infill_at(tokens[:1], tokens.shape[1] // 2),
    "infill_blanks": lambda hmm, tokens, _: hmm.infill_blanks(tokens[:1], excluded=0),
    "sample": lambda hmm, tokens, _: hmm.sample(*eighth([tokens])[0].shape),
    "advance": lambda hmm, tokens, _: hmm.advance(hmm.begin().expand(len(tokens), -1), tokens[:, 0]),
}


def eighth(batch: Sequence[Any]) -> list[Any]:
    """Return the first rows of a batch, for queries about every word at every position."""
    return [each[: len(each) // 8] for each in batch]


def timed(call: Callable[[], object]) -> Run:
    """Return what times calls; one that returns an int did that many units of work, another does one."""
    import torch

    def wait() -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def run(calls: int) -> tuple[float, int]:
        wait()
        began, units = time.perf_counter(), 0
        for _ in range(calls):
            result = call()
            units += result if isinstance(result, int) else 1
        wait()
        return time.perf_counter() - began, units

    return run


# --- the rows ---


def training_rows(device: str) -> Makers:
    """Return the headline steps; tiny ones on a CPU."""
    from lightning_fabric import Fabric

    from benchmarks import speed

    def make(row: Any) -> Run:
        fabric = Fabric(accelerator=device, devices=1, precision="bf16-mixed" if device == "cuda" else "32-true")
        steps = speed.make_steps(row, argparse.Namespace(**row._asdict()), fabric)
        return lambda calls: (timed(lambda: steps.run(calls))(1)[0], calls)

    rows = {name: row if device == "cuda" else speed.shrink(row) for name, row in speed.ROWS.items()}
    return {name: functools.partial(make, row) for name, row in rows.items()}


def steering_rows(device: str) -> Makers:
    """Return the calls of `benchmarks.control calls`, and the set-up of their guides."""
    import torch

    from benchmarks import control

    def guides(states: int, phrases: int) -> Callable[[], Any]:
        hmm, line = control.random_model(states, device), control.anything(control.WORDS)
        for number in range(phrases):
            line &= control.containing([100 + 10 * number, 101 + 10 * number], control.WORDS)
        return lambda: control.Guide(hmm, line.until(control.END), LENGTH)

    def calls(states: int, phrases: int, rows: int) -> Run:
        make_guide, generator = guides(states, phrases), torch.Generator().manual_seed(0)
        words = torch.randint(10, 1000, (rows, STEPS), generator=generator).to(device)
        texts = torch.cat([torch.ones_like(words[:, :1]), words], 1)
        scores = torch.randn(rows, control.WORDS, generator=generator).log_softmax(1).to(device)

        @torch.no_grad()
        def run(passes: int) -> tuple[float, int]:
            spent = 0.0
            for _ in range(passes):
                gc.collect()  # guides refer to themselves: else chance decides how many are in memory
                guide = make_guide()
                steering = control.Steering(guide, guide.begin())
                for step in range(STEPS):
                    given = texts[:, : step + 1].clone()
                    seconds, _ = timed(functools.partial(steering, given, scores))(1)
                    spent += seconds if step >= SKIPPED else 0.0
            return spent, passes * (STEPS - SKIPPED)

        return run

    makers: Makers = {}
    for cell in ((states, phrases) for states in CELLS[device][0] for phrases in CELLS[device][1]):
        name = f"{cell[0]} states, {cell[1]} phrase(s)"
        makers[f"guide, set-up, {name}"] = lambda cell=cell: timed(guides(*cell))  # type: ignore[misc]
        for rows in BATCHES:
            makers[f"steered, one call, {name}, {rows} row(s)"] = functools.partial(calls, *cell, rows)
    return makers


def peer_rows(device: str) -> Makers:
    """Return the operations that `benchmarks.run` also times in other libraries."""
    from benchmarks import problem
    from benchmarks.peers import ours

    def make(operation: str, states: int) -> Run:
        return timed(ours.tasks(problem.make(states))[operation]().run)

    return {f"{op}, {size} states": functools.partial(make, op, size) for op in problem.OPERATIONS for size in SIZES}


def query_rows(device: str) -> Makers:
    """Return the queries of a small, a larger and a blocked model."""
    import torch

    import hmmlm
    from benchmarks import text

    def make(query: str, model: str) -> Run:
        function, arguments, rows, length = MODELS[model]
        hmm, generator = getattr(text, function)(*arguments), torch.Generator().manual_seed(0)
        zipf = 1 / torch.arange(1, text.WORDS + 1)
        tokens = torch.multinomial(zipf, rows * length, replacement=True, generator=generator).view(rows, length)
        tokens[torch.rand(tokens.shape, generator=generator) < 0.03] = -1
        tokens[0, :: length // 2] = -1  # the blanks of infill_blanks
        lengths = torch.randint(length // 4, length + 1, (rows,), generator=generator)

        def call() -> None:
            torch.manual_seed(0)
            QUERIES[query](hmm, tokens, lengths)

        return timed(call)

    names = [query for query in QUERIES if hasattr(hmmlm.HMM, query)]
    return {f"{query}, {model}": functools.partial(make, query, model) for model in MODELS for query in names}


def text_rows(device: str) -> Makers:
    """Return the rows of `benchmarks.text`, which makes the models of all of them at once."""
    from benchmarks import text

    calls = {f"{model}: {what}": call for model, what, call in text.measurements()}
    return {name: functools.partial(timed, call) for name, call in calls.items()}


SECTIONS: dict[str, Callable[[str], Makers]] = {
    "training": training_rows,
    "steering": steering_rows,
    "peers": peer_rows,
    "queries": query_rows,
    "text": text_rows,
}


# --- the processes ---


def receive() -> Any:
    """Return the next request; end this process if nobody is left to make one."""
    line = sys.stdin.readline()
    return json.loads(line) if line else os._exit(ANSWERED)


def send(answer: Any = None, error: str = "") -> None:
    """Answer a request."""
    os.write(ANSWERS, (json.dumps([answer, error]) + "\n").encode())


def send_error(error: Exception) -> None:
    """Answer a request that failed."""
    traceback.print_exception(error)
    send(error=f"{type(error).__name__}: {error}".splitlines()[0])


def in_child(work: Callable[[], int]) -> int:
    """Return the exit code of a forked process: what `work` returns."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        code = work()
    except Exception as error:
        send_error(error)
        code = ANSWERED
    os._exit(code)


def serve(device: str) -> None:
    """Serve requests: (rows, section) → the names of its rows; (row, section, name) → as `serve_row`."""
    sections: dict[str, Makers] = {}
    while True:
        request, section, *names = receive()
        if request == "rows":
            try:
                sections[section] = SECTIONS[section](device)
                send(list(sections[section]))
            except Exception as error:
                send_error(error)
            continue
        make = sections[section][names[0]]
        code = in_child(functools.partial(serve_row, make, device))
        code = code or in_child(functools.partial(send_memory, make))
        if code != ANSWERED:
            send(error=f"its process ended with code {code}")


def keep_freed(size: int) -> None:
    """Let the C library keep freed pieces of memory smaller than `size`, and return larger ones to the system."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, size)
        libc.mallopt(TRIM_THRESHOLD, 2 * size)
        libc.malloc_trim(0)


def serve_row(make: Callable[[], Run], device: str) -> int:
    """Prepare a row, then serve requests: (visit, least seconds) → seconds per unit; (end,) → peak memory in bytes."""
    import torch

    torch.set_num_threads(THREADS)
    gc.freeze()  # to look through all that was imported takes a tenth of a second
    keep_freed(LARGE)  # as in a process that has run for a while
    run = make()
    began, ended = time.perf_counter(), 0.0
    while ended < began + WARM_UP:
        before = time.perf_counter()
        run(1)
        ended = time.perf_counter()
    send()
    while (request := receive())[0] != "end":
        send(visit(run, request[1], ended - before))
    if device == "cpu":
        return 0
    send(torch.cuda.max_memory_allocated())
    return ANSWERED


def visit(run: Run, least: float, seconds: float) -> float:
    """Return the seconds per unit over `least` seconds, or one call, of a row whose call takes `seconds`."""
    began, spent, units, calls = time.perf_counter(), 0.0, 0, max(1, int(least / seconds))
    while not units or time.perf_counter() - began < least:
        more, done = run(calls)
        spent, units = spent + more, units + done
    return spent / units


def send_memory(make: Callable[[], Run]) -> int:
    """Send the peak resident memory in bytes of a few calls.

    They have a process of their own: what was compiled during the visits is on disk now. Freed memory returns to the
    system at once, cycles of objects are collected and pages are small: all this depends on chance otherwise.
    """
    import torch

    torch.set_num_threads(THREADS)
    gc.freeze()
    ctypes.CDLL(None).prctl(NO_HUGE_PAGES, 1, 0, 0, 0)
    run = make()
    keep_freed(SMALL)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins with what is used now
    began, calls = time.perf_counter(), 0
    while calls < 3 or time.perf_counter() < began + WARM_UP:
        gc.collect()
        run(1)
        calls += 1
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    send(1024 * int(status["VmHWM"].split()[0]))
    return ANSWERED


if __name__ == "__main__":
    ANSWERS = os.dup(1)
    os.dup2(2, 1)  # what a row prints is no answer
    keep_freed(SMALL)
    if sys.argv[1] == "cpu":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    import hmmlm

    if Path(hmmlm.__file__).parents[2] != Path.cwd():
        sys.exit(f"hmmlm is that of {Path(hmmlm.__file__).parents[2]}")
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    send()
    serve(sys.argv[1])
