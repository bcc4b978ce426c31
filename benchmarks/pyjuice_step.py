"""Time an EM step of PyJuice's HMM and training steps of hmmlm, interleaved, on one GPU.

    pip install pyjuice
    PYTHONPATH=src python -m benchmarks.pyjuice_step --states 512 --out pyjuice_step.json

Both read tokens of the same shape. PyJuice: forward, backward (expected counts) and its mini-batch M step, with its
CUDA graphs. hmmlm: the steps of `dense_step.py` for the scalar model, with AdamW and with mini-batch Baum-Welch.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from benchmarks.dense_step import ROUNDS, WARM_UP, Training, draw_tokens, seconds_on_gpu


class PyJuice:
    """EM steps of `pyjuice.structures.HMM`."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        import pyjuice

        root = pyjuice.structures.HMM(
            seq_length=options.length, num_latents=options.states, num_emits=options.vocab, homogeneous=True
        )
        self.circuit = pyjuice.compile(root)
        self.circuit.to(device)
        self.batches = [draw_tokens(options.batch, options.length, options.vocab, device) for _ in range(4)]
        self.done, self.log_likelihood = 0, 0.0
        self.run(WARM_UP)

    @torch.no_grad()
    def run(self, steps: int) -> None:
        """Run mini-batch EM steps."""
        for _ in range(steps):
            tokens = self.batches[self.done % len(self.batches)]
            likelihoods = self.circuit(tokens, record_cudagraph=True)
            self.circuit.backward(tokens, flows_memory=0.0, record_cudagraph=True, propagation_alg="LL")
            self.circuit.mini_batch_em(step_size=0.1, pseudocount=1e-3)
            self.done += 1
        self.log_likelihood = float(likelihoods.mean())  # reported, as evidence that the steps were computed


def main() -> None:
    """Time both systems in interleaved rounds, print the medians and write --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=512)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--steps", type=int, default=20, help="steps per timed round")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    ours = {"adamw": Training("scalar", "auto", options, fabric), "em": Training("em", "auto", options, fabric)}
    theirs = PyJuice(options, fabric.device)
    times: dict[str, list[float]] = {name: [] for name in (*ours, "pyjuice")}
    for _ in range(ROUNDS):
        for name, training in ours.items():
            times[name].append(training.seconds(options.steps))
        times["pyjuice"].append(seconds_on_gpu(theirs.run, options.steps))
    tokens = options.batch * options.length
    median = {name: statistics.median(taken) for name, taken in times.items()}
    found: dict[str, Any] = {
        "ms": {name: 1e3 * seconds for name, seconds in median.items()},
        "tokens_per_second": {name: tokens / seconds for name, seconds in median.items()},
        "times_as_fast": {name: median["pyjuice"] / median[name] for name in ours},
        "pyjuice_log_likelihood": theirs.log_likelihood,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "states": options.states,
    }
    print(json.dumps(found, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
