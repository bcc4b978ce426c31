"""Measure time and memory of a training step against states, sequence length, batch and vocabulary.

    PYTHONPATH=src python -m benchmarks.curves --device cpu      # some minutes
    PYTHONPATH=src python -m benchmarks.curves --device cuda     # a minute
    python -m papers publish                                     # the figures, log-log, with slopes

Each size in turn is a quarter to four times that of a base model (`papers.other.CURVES`), the others stay. The model is
scalar, with AdamW. Memory is what the process uses during the step beyond what it used before the model was made.
Linux only. Writes results/time-curves-DEVICE.json and results/memory-curves-DEVICE.json.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from benchmarks.dense_step import Training
from benchmarks.speed import ROUND_SECONDS, Row, step_seconds
from papers.other import AXES, BASES, MULTIPLES, point_name
from papers.records import add_record, commit, machine

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def memory_now(device: torch.device, field: str) -> float:
    """Return GB that this process uses: field "VmRSS", or "VmHWM" for the most since `forget_peak`."""
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated if field == "VmHWM" else torch.cuda.memory_allocated
        return float(used(device)) / 1e9
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e9


def forget_peak(device: torch.device) -> None:
    """Start to record the peak of memory anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process keeps would hide what the next model takes
        RESET.write_text("5")


def measure(row: Row, fabric: Fabric, round_seconds: float) -> dict[str, dict[str, float]]:
    """Return time and memory of a training step, by kind of curve."""
    device = fabric.device
    forget_peak(device)
    before = memory_now(device, "VmRSS")
    steps = Training("scalar", "auto", argparse.Namespace(**row._asdict()), fabric)
    seconds = step_seconds(steps.run, device.type == "cuda", 3, round_seconds)
    return {
        "time": {"step_ms": 1e3 * seconds, "tokens_per_second": float(round(row.tokens / seconds))},
        "memory": {"peak_memory_gb": max(1e-6, memory_now(device, "VmHWM") - before)},
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure every point and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=BASES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide the base sizes, and rounds are shorter: to test the script"
    )
    given = parser.parse_args(arguments)
    cuda = given.device == "cuda"
    fabric = Fabric(accelerator=given.device, devices=1, precision="bf16-mixed" if cuda else "32-true")
    if cuda:
        torch.cuda.init()  # statistics of memory exist only then
    base = {name: max(2, size // given.shrink) for name, size in BASES[given.device].items()}
    seconds = ROUND_SECONDS / given.shrink**2
    for states in (max(2, base["states"] // 4), base["states"]):  # the first models of either kind also load libraries
        measure(Row("scalar", **base | {"states": states}), fabric, seconds)
    for axis in given.axes:
        for multiple in MULTIPLES:
            sizes = base | {AXES[axis]: max(2, int(base[AXES[axis]] * multiple))}
            found = measure(Row("scalar", **sizes), fabric, seconds)
            print(point_name(axis, multiple), sizes, found, flush=True)
            for curve, metrics in found.items():
                record: dict[str, Any] = {
                    "row": point_name(axis, multiple),
                    "recipe": "benchmarks/curves.py",
                    "metrics": {name: float(f"{value:.4g}") for name, value in metrics.items()},
                    "seed": 0,
                    "settings": sizes,
                    "command": f"python -m benchmarks.curves --device {given.device}",
                    "commit": commit(),
                    "machine": machine(cuda),
                    "date": time.strftime("%Y-%m-%d"),
                }
                add_record(given.results / f"{curve}-curves-{given.device}.json", record)


if __name__ == "__main__":
    main()
