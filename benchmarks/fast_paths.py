"""Time what each fast path on a CPU buys: the same call with it and without it.

python -m benchmarks.fast_paths        # a few minutes; writes results/fast-paths.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import hmmlm
from benchmarks.text import blocked_model
from hmmlm.constrain.automaton import containing
from hmmlm.hmm.hmm import HMM
from hmmlm.numerics.semirings import PROBABILITY
from hmmlm.scan import implementations
from hmmlm.scan.composition import map_tensors
from hmmlm.scan.steps import Steps
from papers.records import add_record, commit, machine

WORDS, VISIT_SECONDS, VISITS = 10_000, 0.2, 7


class FastPath(NamedTuple):
    """A fast path, the row that shows it, and how it is switched off."""

    name: str
    files: str
    row: str
    prepare: Callable[[], Callable[[], Any]]
    without: dict[str, Any]  # what is replaced, by name


def dense(states: int, words: int = WORDS) -> HMM:
    generator = torch.Generator().manual_seed(0)
    shapes = ((states,), (states, states), (states, words))
    return HMM(*(torch.randn(shape, generator=generator).log_softmax(-1) for shape in shapes))


def texts(batch: int, length: int) -> torch.Tensor:
    """Return tokens with Zipfian frequencies."""
    generator = torch.Generator().manual_seed(1)
    chances = 1 / torch.arange(1.0, WORDS + 1)
    return torch.multinomial(chances, batch * length, replacement=True, generator=generator).view(batch, length)


def learning(make: Callable[[], HMM], batch: int, length: int) -> Callable[[], Callable[[], Any]]:
    """Return likelihood and gradient of a model."""

    def prepare() -> Callable[[], Any]:
        hmm = map_tensors(make(), lambda values: values.requires_grad_())
        tokens = texts(batch, length)
        return lambda: hmm.log_likelihood(tokens).sum().backward()

    return prepare


def asking(make: Callable[[], HMM], query: str, batch: int, length: int, **options: Any) -> Callable[[], Any]:
    """Return a query of a model."""

    def prepare() -> Callable[[], Any]:
        hmm, tokens = make(), texts(batch, length)
        return lambda: getattr(hmm, query)(tokens, **options)

    return prepare


def steering(states: int) -> Callable[[], Callable[[], Any]]:
    """Return the scores of the next token under a guide, and reading a token."""

    def prepare() -> Callable[[], Any]:
        guide = hmmlm.Guide(dense(states, 32_000), containing([5, 6], 32_000), 20)
        position = guide.begin()
        return lambda: guide.log_probs_accept(guide.advance(position, 7))

    return prepare


def few_columns() -> HMM:
    """Return a model three quarters of whose words have never occurred."""
    hmm = dense(1024)
    log_probs = hmm.emission.log_probs  # type: ignore[attr-defined]
    log_probs[:, WORDS // 4 :] = log_probs[:, :1] - 5
    return HMM(hmm.log_start, hmm.transition, log_probs.log_softmax(1))


def small() -> HMM:
    return blocked_model(512, 32)


def large() -> HMM:
    return blocked_model(2**13, 64)


def all_but(name: str) -> dict[str, Any]:
    """Return the registry without an implementation."""
    rest = tuple(each for each in implementations.IMPLEMENTATIONS if each.name != name)
    return {"hmmlm.scan.implementations.IMPLEMENTATIONS": rest}


LOOPS = "ops/scan/compiled.py ops/loops.py ops/lanes.py ops/tiles.py ops/threads.py"
NO_LOOPS = {"hmmlm.scan.recursions.path_loops_pay": lambda *_: False}
PATHS = (
    FastPath(
        "loops",
        LOOPS,
        "likelihood and gradient, dense, 64 states",
        learning(lambda: dense(64), 64, 64),
        all_but("compiled"),
    ),
    FastPath("loops", LOOPS, "Viterbi, dense, 64 states", asking(lambda: dense(64), "viterbi", 64, 64), NO_LOOPS),
    FastPath(
        "products",
        "scan/products.py",
        "posterior, dense, 64 states",
        asking(lambda: dense(64), "posterior", 64, 32),
        {"hmmlm.scan.recursions.filter_dense": lambda *_: None},
    ),
    FastPath(
        "tiles",
        "scan/implementations.py (30 lines)",
        "likelihood, blocked, 512 states",
        asking(small, "log_likelihood", 64, 32),
        all_but("tiles"),
    ),
    FastPath(
        "stream",
        "scan/blocked_stream.py",
        "one text of 1,000 tokens, blocked, 512 states",
        asking(small, "token_log_probs", 1, 1000),
        {"hmmlm.scan.recursions.is_stream": lambda *_: False},
    ),
    FastPath(
        "tiles of a batch",
        "scan/steps.py (TileSteps)",
        "likelihood and gradient, blocked, 8,192 states",
        learning(large, 16, 32),
        {"hmmlm.scan.generic_filter.between": lambda transition, *_: Steps(PROBABILITY, transition)},
    ),
    FastPath(
        "kept tiles",
        "transitions/tilestore.py",
        "posterior, blocked, 8,192 states",
        asking(large, "posterior", 16, 32),
        {"hmmlm.transitions.tiled._STORED_SHARE": 0.0},
    ),
    FastPath(
        "next words of a block",
        "hmm/word_products.py",
        "next token, blocked, 512 states",
        asking(small, "next_token", 64, 8),
        {"hmmlm.hmm.queries.Queries._predicts_by_block": False},
    ),
    FastPath(
        "paths in NumPy",
        "hmm/sampling.py (draw_paths)",
        "posterior sample, dense, 64 states",
        asking(lambda: dense(64), "posterior_sample", 4, 256),
        {"hmmlm.hmm.queries.Dense": type(None)},
    ),
    *(
        FastPath(
            "guides in products",
            "constrain/guided_cpu.py",
            f"a token under a guide, {states:,} states × 32,000 words",
            steering(states),
            {"hmmlm.constrain.guided.cpu_matrices": lambda _: None},
        )
        for states in (64, 1024)
    ),
    FastPath(
        "equal columns",
        "emissions/columns.py (equal_columns)",
        "next token, dense, 1,024 states, 7,500 words that never occurred",
        asking(few_columns, "next_token", 64, 8),
        {"hmmlm.emissions.columns.equal_columns": lambda _: None},
    ),
)


@contextmanager
def replaced(values: dict[str, Any]) -> Iterator[None]:
    """Replace attributes by name."""
    patches = [mock.patch(name, value) for name, value in values.items()]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def visit(call: Callable[[], Any]) -> float:
    """Return the least time of calls within a visit."""
    best, ends = float("inf"), time.perf_counter() + VISIT_SECONDS
    while time.perf_counter() < ends:
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="fast paths whose name contains this")
    options = parser.parse_args()
    for path in PATHS:
        if options.only not in path.name:
            continue
        call = path.prepare()
        with replaced(path.without):
            slow = path.prepare()
        times: dict[str, list[float]] = {"with": [], "without": []}
        for _ in range(VISITS):  # interleaved, so that other load affects both
            times["with"].append(visit(call))
            with replaced(path.without):
                times["without"].append(visit(slow))
        fast, other = min(times["with"]), min(times["without"])
        metrics = {
            "with_ms": float(f"{1e3 * fast:.3g}"),
            "without_ms": float(f"{1e3 * other:.3g}"),
            "times_as_fast": round(other / fast, 2),
        }
        print(f"{path.name}: {path.row}", metrics, flush=True)
        add_record(
            Path("results/fast-paths.json"),
            {
                "row": f"{path.name}: {path.row}",
                "recipe": "benchmarks/fast_paths.py",
                "metrics": metrics,
                "seed": 0,
                "settings": {"files": path.files, "threads": torch.get_num_threads()},
                "command": "python -m benchmarks.fast_paths",
                "commit": commit(),
                "machine": machine(False),
                "date": time.strftime("%Y-%m-%d"),
                "note": f"least of {VISITS} visits of {VISIT_SECONDS} s each",
            },
        )


if __name__ == "__main__":
    main()
