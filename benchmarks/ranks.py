"""Tokens per second and memory by number of processes: on the CPU with one thread each, or on GPUs.

    python -m benchmarks.ranks --processes 1 2
    python -m benchmarks.ranks --processes 1 2 --device cuda

Trains models of several families on the embedded corpus for some steps, as `hmmlm train` does under torchrun, and
prints the tables of docs/guide/scaling.md. Needs as many idle cores as processes. Processes that outnumber the GPUs
share them, which shows the memory of each, and not the speed of several GPUs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from hmmlm.runs.history import HISTORY, read_history

LENGTH = 32
BATCH = {"cpu": 256, "cuda": 64}
STEPS = {"cpu": 30, "cuda": 10}
"""Few on GPUs: processes that share one sum their gradients on the CPU."""
SCALAR = ("--model.kind", "scalar", "--model.num-states", "512")
BAUM_WELCH = ("--optimizer.kind", "baum-welch")
MODELS = {
    "scalar, 512 states, AdamW": SCALAR,
    "scalar, 512 states, Baum-Welch": (*SCALAR, *BAUM_WELCH),
    "neural, 1,024 states in 16 blocks": (
        "--model.kind",
        "neural",
        "--model.num-states",
        "1024",
        "--model.blocks",
        "16",
    ),
}


GPU_SCALAR = ("--model.kind", "scalar", "--model.num-states", "4096")
GPU_MODELS = {
    "scalar, 4,096 states, AdamW": GPU_SCALAR,
    "neural, 2^15 states in 128 blocks": (
        "--model.kind",
        "neural",
        "--model.num-states",
        "32768",
        "--model.blocks",
        "128",
    ),
}


def measure(processes: int, settings: tuple[str, ...], device: str, out: Path) -> str:
    """Train for some steps; return the speed of its fastest record, and the memory of rank 0."""
    sizes = {
        "--batches.batch-size": BATCH[device],
        "--batches.length": LENGTH,
        "--train.max-tokens": STEPS[device] * BATCH[device] * LENGTH,
        "--train.log-every": STEPS[device] // 10,
        "--train.device": device,
    }
    options = [str(part) for item in sizes.items() for part in item]
    # torchrun: `--train.devices` takes no more processes than there are GPUs.
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "hmmlm"]
    command = [sys.executable, *start, "train", "--data", "embedded", "--out", str(out), "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options, *settings], check=True, env=environment, stdout=subprocess.PIPE)
    speeds = [record["tokens_per_second"] for record in read_history(out / HISTORY) if record["event"] == "train"]
    memory = re.search(r"([\d.]+) GB of memory", done.stdout.decode())
    assert memory is not None
    return f"{max(speeds):,.0f}, {memory[1]} GB"  # other programs only ever slow a record down


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    counts = arguments.processes
    print("| model | " + " | ".join(f"{count} process{'es' * (count > 1)}" for count in counts) + " |")
    print("|---" * (len(counts) + 1) + "|")
    for name, settings in (MODELS if arguments.device == "cpu" else GPU_MODELS).items():
        with TemporaryDirectory() as folder:
            cells = [measure(count, settings, arguments.device, Path(folder) / str(count)) for count in counts]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
