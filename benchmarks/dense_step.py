"""Time a whole training step of dense models, and check the scan that it uses.

    PYTHONPATH=src python benchmarks/dense_step.py --out dense_step.json [--compare] [--profile]

A step is θ → distributional parameters → likelihood → gradient → clip → AdamW on chunks of tokens with Zipfian
frequencies (em: → expected counts → M step); on a GPU it is the replay of a CUDA graph. The check compares likelihood,
carry and gradients of a smaller batch with the portable implementation in float64. --compare also times the portable
implementation, interleaved with the other. --profile writes a table of the time per kernel next to the JSON file, with
the suffix .txt.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from hmmlm.config.sections import AdamWConfig, BaumWelchConfig
from hmmlm.data.batches import Batch
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.hmm import HMM
from hmmlm.learning.fused_adamw import fuse
from hmmlm.learning.learners import AdamWLearner, BaumWelchLearner, HmmLearner
from hmmlm.models.base import Model
from hmmlm.models.factored import DenseFactored
from hmmlm.models.scalar import Scalar
from hmmlm.ops.common import Impl
from hmmlm.ops.scan import Evidence, Parameters, scan

ADAMW = AdamWConfig(lr=1e-3)
EM = BaumWelchConfig(full_batch=False, step=0.1, pseudocount=1e-5)
MODELS: dict[str, tuple[Callable[[int, int], Model], AdamWConfig | BaumWelchConfig]] = {
    "scalar": (Scalar, ADAMW),
    "linear": (lambda states, vocab: DenseFactored(states, vocab, hidden=256), ADAMW),  # ablation B, as in the recipe
    "em": (Scalar, EM),  # mini-batch Baum-Welch, as in the recipe
}
WARM_UP, ROUNDS = 5, 7  # untimed steps, more than graph capture needs; timed rounds per implementation


def draw_tokens(batch: int, length: int, vocab: int, device: torch.device) -> Tensor:
    """Return random tokens [B, T] with Zipfian frequencies."""
    zipf = 1 / torch.arange(1, vocab + 1, device=device)
    words = torch.randperm(vocab, device=device)  # token ids are independent of frequency
    return words[torch.multinomial(zipf, batch * length, replacement=True)].view(batch, length)


class Steps:
    """Training steps of a model on random batches."""

    def __init__(
        self,
        model: Model,
        optimizer: AdamWConfig | BaumWelchConfig,
        options: argparse.Namespace,
        fabric: Fabric,
        fused: bool = True,
    ) -> None:
        self.model, self.cuda = model, fabric.device.type == "cuda"
        tokenizer = WordTokenizer(["<unk>", "<eos>", *map(str, range(options.vocab - 2))])
        learner: HmmLearner
        if isinstance(optimizer, BaumWelchConfig):
            learner = BaumWelchLearner(fabric, model, tokenizer, {}, optimizer)
        else:
            learner = AdamWLearner(fabric, model, tokenizer, {}, optimizer)
        self.learner = fuse(learner) if fused else learner
        drawn = [draw_tokens(options.batch, options.length, options.vocab, torch.device("cpu")) for _ in range(4)]
        self.batches = [Batch(tokens, None, None, False) for tokens in drawn]
        self.done = 0
        self.run(WARM_UP)

    def run(self, steps: int) -> None:
        """Run training steps."""
        for _ in range(steps):
            self.learner.step(self.batches[self.done % len(self.batches)], None, self.learner.peak_lr)
            self.done += 1

    def seconds(self, steps: int) -> float:
        """Return the mean time of one step."""
        if not self.cuda:
            begin = time.perf_counter()
            self.run(steps)
            return (time.perf_counter() - begin) / steps
        return seconds_on_gpu(self.run, steps)


class Training(Steps):
    """Training steps of one dense model with one implementation of the scan."""

    def __init__(self, kind: str, impl: Impl, options: argparse.Namespace, fabric: Fabric) -> None:
        torch.manual_seed(0)
        make, optimizer = MODELS[kind]
        model = make(options.states, options.vocab)
        inner = model.forward

        def forward() -> HMM:
            hmm = inner()
            assert isinstance(hmm, HMM)
            hmm.impl = impl
            return hmm

        model.forward = forward  # type: ignore[method-assign]
        super().__init__(model, optimizer, options, fabric, fused=impl == "auto")


def seconds_on_gpu(run: Callable[[int], None], steps: int) -> float:
    """Return the mean time of one step of run(steps)."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    run(steps)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / steps


def check(options: argparse.Namespace, device: torch.device, precision: str, spread: float = 1.0) -> dict[str, float]:
    """Return the relative errors, against float64, of the scan that `auto` selects in the precision of training.

    `spread` is the standard deviation of the logits: 1 for parameters as at the start of training, 4 for peaked ones.
    """
    states, batch, length = options.states, min(options.batch, 24), min(options.length, 16)
    shapes = ((states,), (states, states), (states, options.vocab))
    logits = [spread * torch.randn(*shape, device=device) for shape in shapes]
    tokens = draw_tokens(batch, length, options.vocab, device)
    tokens[torch.rand(tokens.shape, device=device) < 0.02] = -1
    restart = torch.rand(tokens.shape, device=device) < 0.05
    carry = torch.rand(batch, states, device=device).double().log_softmax(1)
    weight = torch.rand(batch, device=device)
    found, choices = [], (("auto", torch.float32), ("scaled", torch.float64))
    impl: Impl
    for impl, dtype in choices:  # type: ignore[assignment]
        start, transition, emission = (x.log_softmax(-1).to(dtype).requires_grad_() for x in logits)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed" and impl == "auto"):
            result = scan(Parameters(start, transition, emission), Evidence(tokens, None, carry, restart), impl)
        leaves = (start, transition, emission)
        gradients = torch.autograd.grad(result.log_likelihood, leaves, weight.to(dtype))
        found.append([result.log_likelihood.detach(), result.carry.log_probs.exp(), *gradients])
    names = ("log_likelihood", "carry", "start", "transition", "emission")
    pairs = zip(names, *found, strict=True)
    return {name: float((got.double() - want).norm() / want.norm()) for name, got, want in pairs}


def measure(kind: str, options: argparse.Namespace, fabric: Fabric) -> list[dict[str, Any]]:
    """Return one row of timings per implementation."""
    impls: list[Impl] = ["auto", "scaled"] if options.compare else ["auto"]
    training = {impl: Training(kind, impl, options, fabric) for impl in impls}
    times: dict[Impl, list[float]] = {impl: [] for impl in impls}
    for _ in range(ROUNDS):
        for impl in impls:
            times[impl].append(training[impl].seconds(options.steps))
    rows = []
    for impl in impls:
        median = statistics.median(times[impl])
        rows.append(
            {
                "model": kind,
                "impl": impl,
                "states": options.states,
                "batch": options.batch,
                "length": options.length,
                "vocab": options.vocab,
                "precision": options.precision,
                "ms": median * 1e3,
                "tokens_per_second": options.batch * options.length / median,
                "least_ms": min(times[impl]) * 1e3,
                "skipped": int(training[impl].model.skipped),
                "times_portable": statistics.median(times["scaled"]) / median if options.compare else None,
            }
        )
    if options.profile:
        with options.out.with_suffix(".txt").open("a") as file:
            file.write(f"{kind}, {options.states} states\n{profile(training['auto'])}\n")
    return rows


def profile(training: Steps) -> str:
    """Return a table of the time per kernel in one step, most expensive first."""
    lines = [f"{total:10.1f} {count:6d} {total / count:9.2f}  {name[:60]}" for total, count, name in kernels(training)]
    return "\n".join([f"{'µs':>10} {'count':>6} {'µs each':>9}  kernel", *lines]) + "\n"


def kernels(training: Steps) -> list[tuple[float, int, str]]:
    """Return µs, calls and name of each kernel of one step, most expensive first."""
    kind = torch.profiler.ProfilerActivity.CUDA if training.cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as recorded:
        training.run(1)
        if training.cuda:
            torch.cuda.synchronize()
    spent = "self_device_time_total" if training.cuda else "self_cpu_time_total"  # µs
    events = [(getattr(event, spent), event.count, event.key) for event in recorded.key_averages()]
    return sorted((event for event in events if event[0]), reverse=True)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a Markdown table."""
    print("| model | scan | states | batch × length | words | ms per step | tokens/s | skipped | × portable |")
    print("|---" * 9 + "|")
    for row in rows:
        ratio = "" if row["times_portable"] is None else f"{row['times_portable']:.2f}"
        print(
            f"| {row['model']} | {row['impl']} | {row['states']:,} | {row['batch']} × {row['length']} | "
            f"{row['vocab']:,} | {row['ms']:.3f} | {row['tokens_per_second']:,.0f} | {row['skipped']} | {ratio} |"
        )


def main(arguments: list[str] | None = None) -> None:
    """Time the chosen models, check the scan, print tables and write --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=512)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="bf16-mixed")
    parser.add_argument("--steps", type=int, default=50, help="steps per timed round")
    parser.add_argument("--compare", action="store_true", help="time the portable implementation as well")
    parser.add_argument("--profile", action="store_true", help="write a table of the time per kernel")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    if options.profile:
        if options.out is None:
            parser.error("--profile writes next to the JSON file: set --out")
        options.out.with_suffix(".txt").unlink(missing_ok=True)
    fabric = Fabric(accelerator="cuda" if torch.cuda.is_available() else "cpu", devices=1, precision=options.precision)
    cuda = fabric.device.type == "cuda"
    rows = [row for kind in options.models for row in measure(kind, options, fabric)]
    show(rows)
    errors = check(options, fabric.device, options.precision)
    print("\n| relative error of | |\n|---|---|")
    print("\n".join(f"| {name} | {value:.1e} |" for name, value in errors.items()))
    if options.out is not None:
        device = torch.cuda.get_device_name() if cuda else "cpu"
        options.out.write_text(
            json.dumps({"device": device, "torch": torch.__version__, "errors": errors, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
