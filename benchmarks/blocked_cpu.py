"""Time likelihood and gradient of the blocked scan on the CPU, with shared tiles and with one tile per step.

python -m benchmarks.blocked_cpu        # a minute or two; writes results/blocked-cpu.json
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch

from hmmlm.models.base import from_factors
from hmmlm.ops.blocked_scan import Factors
from hmmlm.scan import steps
from hmmlm.scan.generic_scan import generic_scan
from papers.records import add_record, commit, machine

WORDS, BATCH, TIME, HIDDEN, REPEATS = 10_000, 16, 32, 256, 5
SIZES = ((1, 512), (4, 128), (16, 64), (64, 64), (128, 32))  # blocks, states of each


def problem(blocks: int, kept: int) -> tuple[Factors, torch.Tensor, torch.Tensor]:
    """Return factors, an entry, and tokens with Zipfian frequencies."""
    generator = torch.Generator().manual_seed(0)
    states = blocks * kept
    u, w = (0.3 * torch.randn(states, HIDDEN, generator=generator) for _ in range(2))
    normalizer = (u @ w.T).logsumexp(1)
    start = torch.randn(states, generator=generator).log_softmax(0)
    emission = torch.randn(WORDS, kept, generator=generator).log_softmax(0)
    chances = 1 / torch.arange(1.0, WORDS + 1)
    tokens = torch.multinomial(chances, BATCH * TIME, replacement=True, generator=generator).view(BATCH, TIME)
    entry = torch.full((BATCH, 1, kept), -math.log(states))
    return Factors(torch.arange(WORDS) % blocks, u, w, normalizer, start, emission), entry, tokens


def seconds(factors: Factors, entry: torch.Tensor, tokens: torch.Tensor) -> float:
    """Return the time of one forward and backward pass."""
    block_of_word, *parameters = factors
    leaves = Factors(block_of_word, *(x.clone().requires_grad_() for x in parameters))
    began = time.perf_counter()
    generic_scan(from_factors(leaves), tokens, entry=entry).log_likelihood.sum().backward()
    return time.perf_counter() - began


def main() -> None:
    """Time both variants at every size and add the results to results/blocked-cpu.json."""
    most = steps._TILE_CELLS
    for blocks, kept in SIZES:
        given, times = problem(blocks, kept), {"shared": [], "own": []}  # type: ignore[var-annotated]
        for _ in range(REPEATS):  # interleaved, so that other load affects both
            for name, cells in (("shared", most), ("own", 0)):
                steps._TILE_CELLS = cells
                times[name].append(seconds(*given))
        shared, own = min(times["shared"]), min(times["own"])
        row = f"{blocks} blocks of {kept} states" if blocks > 1 else f"{kept} states, no blocks"
        metrics = {
            "as_it_comes_ms": round(1e3 * shared, 1),
            "a_tile_a_step_ms": round(1e3 * own, 1),
            "times_as_fast": round(own / shared, 2),
        }
        print(row, metrics, flush=True)
        add_record(
            Path("results/blocked-cpu.json"),
            {
                "row": row,
                "recipe": "benchmarks/blocked_cpu.py",
                "metrics": metrics,
                "seed": 0,
                "settings": {"batch": BATCH, "length": TIME, "hidden": HIDDEN, "words": WORDS},
                "command": "python -m benchmarks.blocked_cpu",
                "commit": commit(),
                "machine": machine(False),
                "date": time.strftime("%Y-%m-%d"),
                "note": f"least of {REPEATS} times",
            },
        )
    steps._TILE_CELLS = most


if __name__ == "__main__":
    main()
