"""Tokens per second by number of processes, on the CPU with one thread each.

    python -m benchmarks.ranks --processes 1 2

Trains models of several families on the embedded corpus for some steps, as `hmmlm train --train.devices N` does, and
prints the table of docs/guide/scaling.md. Needs as many idle cores as processes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from hmmlm.runs.history import HISTORY, read_history

BATCH, LENGTH, STEPS = 64, 32, 100
SCALAR = ("--model.kind", "scalar", "--model.states", "512")
BAUM_WELCH = ("--optimizer.kind", "baum-welch")
SHARD = ("--model.shard",)
MODELS = {
    "scalar, 512 states, AdamW": SCALAR,
    "scalar, 512 states, Baum-Welch": (*SCALAR, *BAUM_WELCH),
    "scalar, 512 states, AdamW, `model.shard`": (*SCALAR, *SHARD),
    "scalar, 512 states, Baum-Welch, `model.shard`": (*SCALAR, *BAUM_WELCH, *SHARD),
    "neural, 1,024 states in 16 blocks": ("--model.kind", "neural", "--model.states", "1024", "--model.blocks", "16"),
}


def tokens_per_second(processes: int, settings: tuple[str, ...], out: Path) -> float:
    """Train for STEPS steps and return the median speed of its records, without the first."""
    sizes = {
        "--batches.batch-size": BATCH,
        "--batches.length": LENGTH,
        "--train.max-tokens": STEPS * BATCH * LENGTH,
        "--train.log-every": STEPS // 10,
        "--train.devices": processes,
        "--train.device": "cpu",
    }
    options = [str(part) for item in sizes.items() for part in item]
    command = [sys.executable, "-m", "hmmlm", "train", "--data", "embedded", "--out", str(out), "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *options, *settings], check=True, env=environment, stdout=subprocess.DEVNULL)
    speeds = [record["tokens_per_second"] for record in read_history(out / HISTORY) if record["event"] == "train"]
    return median(speeds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    counts = parser.parse_args().processes
    print("| model | " + " | ".join(f"{count} process{'es' * (count > 1)}" for count in counts) + " |")
    print("|---" * (len(counts) + 1) + "|")
    for name, settings in MODELS.items():
        with TemporaryDirectory() as folder:
            speeds = [tokens_per_second(count, settings, Path(folder) / str(count)) for count in counts]
        print(f"| {name} | " + " | ".join(f"{speed:,.0f}" for speed in speeds) + " |", flush=True)


if __name__ == "__main__":
    main()
