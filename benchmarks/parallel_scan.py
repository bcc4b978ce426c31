"""Time the likelihood of long sequences in parallel chunks, beside one step after another.

python -m benchmarks.parallel_scan                  # five minutes on one core; writes results/parallel-scan.json
python -m benchmarks.parallel_scan --device cuda    # a minute on a GPU; adds rows
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.fast_paths import WORDS, dense, texts
from hmmlm.scan.composition import map_tensors
from papers.records import add_record, commit, machine

SIZES = {
    "cpu": [(states, 1, 10**k) for states in (2, 4, 8, 16, 32, 64, 128) for k in (3, 4, 5, 6)],
    "cuda": [(states, 1, 10**k) for states in (16, 64, 128) for k in (3, 4, 5, 6)]
    + [(64, batch, 10_000) for batch in (16, 64)],
}
"""States, sequences, tokens of each; tokens ascend."""
IMPLS = {
    "cpu": {"loops": "compiled", "steps": "scaled", "chunks": "parallel"},
    "cuda": {"steps": "triton", "chunks": "parallel"},
}
VISIT_SECONDS, LONGEST = 0.3, 1.0  # a call that takes longer than LONGEST is timed once, and longer ones are left out
NO_LOOPS = {"target": "hmmlm.ops.scan.api._importable", "new": lambda package: False}


def prepare(states: int, tokens: torch.Tensor, impl: str, learns: bool) -> Callable[[], None]:
    """Return a call that computes the likelihood, with the gradient if it `learns`."""
    hmm = map_tensors(dense(states).to(tokens.device), lambda values: values.requires_grad_(learns))
    hmm.impl = impl  # type: ignore[assignment]

    def call() -> None:
        found = hmm.log_likelihood(tokens).sum()
        if learns:
            found.backward()

    return call


def least_time(call: Callable[[], Any], device: str) -> float:
    """Return the least time of calls for a while."""
    best, ends = float("inf"), time.perf_counter() + VISIT_SECONDS
    while True:
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
        if time.perf_counter() > ends:
            return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=tuple(SIZES))
    device, last = parser.parse_args().device, dict[tuple[Any, ...], float]()
    for states, batch, steps in SIZES[device]:
        tokens, metrics = texts(batch, steps).to(device), dict[str, float]()
        for name, impl in IMPLS[device].items():
            for what in ("likelihood", "gradient"):
                key = (states, batch, name, what)
                if last.get(key, 0.0) > LONGEST:
                    continue
                call = prepare(states, tokens, impl, what == "gradient")
                with mock.patch(**NO_LOOPS) if name == "chunks" else nullcontext():  # type: ignore[call-overload]
                    if key not in last:
                        call()  # compiles
                    last[key] = least_time(call, device)
                metrics[f"{name}_{what}_ms"] = float(f"{1e3 * last[key]:.3g}")
        count = f"{steps:,}" if batch == 1 else f"{batch} × {steps:,}"
        row = f"{'GPU' if device == 'cuda' else 'CPU'}, {states} states, {count} tokens"
        print(row, metrics, flush=True)
        add_record(
            Path("results/parallel-scan.json"),
            {
                "row": row,
                "recipe": "benchmarks/parallel_scan.py",
                "metrics": metrics,
                "seed": 0,
                "settings": {"words": WORDS, "threads": torch.get_num_threads()},
                "command": "python -m benchmarks.parallel_scan" + (" --device cuda" if device == "cuda" else ""),
                "commit": commit(),
                "machine": machine(device == "cuda"),
                "date": time.strftime("%Y-%m-%d"),
                "note": f"least time of calls for {VISIT_SECONDS} s; chunks without compiled loops",
            },
        )


if __name__ == "__main__":
    main()
