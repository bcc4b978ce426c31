"""Measure the headline steps, each beside its peers: writes results/speed.json.

    PYTHONPATH=src python -m benchmarks.speed                              # two minutes on one H200
    PYTHONPATH=src python -m benchmarks.speed --rows "dense 512 AdamW" --profile results/speed-profile.txt
    PYTHONPATH=src python -m benchmarks.speed --small --out small.json     # the same rows, tiny: a test of the script

A training step is that of `benchmarks.dense_step`; an evaluation step is `hmm.log_likelihood` of a batch under a fixed
model.
Peers run in the same process, right after the row:

- bare products: only the matrix products that cannot be avoided, as a CUDA graph: a lower bound;
- drawn products: the same products of random values, which take more power than those of equal values: a GPU at its
  limit of power lowers its clock, as in a step;
- autograd: the log-space recursion as a loop in torch, differentiated by autograd, where it fits;
- PyJuice: an EM step, if PyJuice is installed.

Errors are relative to float64, in the Euclidean norm: of the likelihood, and the largest of all gradients, for
parameters as at the start of training, and for peaked ones.

--profile writes a table of kernels for each row. The bytes of a row are what it has to read and write at least
(parameters, moments, tokens' emissions); the FLOP are those of the bare products. Both are shown as shares of the
limits of the device, which are measured: a copy of 1 GiB, and a product of 8,192 × 8,192 matrices.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor

from benchmarks.dense_step import ADAMW, ROUNDS, Steps, Training, check, draw_tokens, kernels, seconds_on_gpu
from benchmarks.peers.bare import products
from benchmarks.peers.loop import log_likelihood
from hmmlm.hmm import HMM
from hmmlm.models.base import from_factors
from hmmlm.models.neural import Neural
from hmmlm.ops.blocked_scan import Factors, blocked_scan, refusal
from hmmlm.ops.common import installed
from hmmlm.scan.generic_scan import generic_scan
from hmmlm.structure.blocks import Blocks
from papers.records import add_record, commit, machine

ROUND_SECONDS = 0.15  # of each of the ROUNDS rounds of a row
PEER_ROUNDS = 3  # of each peer
PEAKED = 4.0  # standard deviation of the logits
LOOP_CELLS = 2**32  # largest [T, B, Z, Z] that autograd keeps
Run = Callable[[int], None]


class Row(NamedTuple):
    """One row of the table."""

    kind: str  # of the model in `dense_step.MODELS`; "evaluation"; "neural"
    states: int
    batch: int = 200
    length: int = 64
    vocab: int = 32_000
    dropout: float = 0.0
    paper_ms: float | None = None

    @property
    def tokens(self) -> int:
        return self.batch * self.length


ROWS = {
    "dense 512 AdamW": Row("scalar", 512),
    "dense 512 Baum-Welch": Row("em", 512),
    "dense 4096 AdamW": Row("scalar", 4096),
    "dense 512 AdamW, batch 2048": Row("scalar", 512, batch=2048),
    "dense 16384 AdamW, batch 256": Row("scalar", 16_384, batch=256),
    "evaluation 4096": Row("evaluation", 4096),
    "VL-HMM 2^15": Row("neural", 2**15, 16, 32, 10_000, dropout=0.5, paper_ms=238.0),
    "VL-HMM 2^17": Row("neural", 2**17, 16, 32, 10_000, dropout=0.75),
}
BLOCKS, HIDDEN = 128, 256


def shrink(row: Row) -> Row:
    """Return a row that takes a moment on a CPU."""
    return row._replace(states=max(256, row.states // 64), batch=8, length=8, vocab=500)


# --- the steps ---


class Evaluation:
    """The likelihood of batches under a fixed model."""

    def __init__(self, row: Row, fabric: Fabric) -> None:
        torch.manual_seed(0)
        shapes = ((row.states,), (row.states, row.states), (row.states, row.vocab))
        self.hmm = HMM(*(torch.randn(shape, device=fabric.device).log_softmax(-1) for shape in shapes))
        self.batches = [draw_tokens(row.batch, row.length, row.vocab, fabric.device) for _ in range(4)]
        self.fabric, self.cuda, self.done = fabric, fabric.device.type == "cuda", 0
        self.run(10)  # the first ones of a shape are not replayed

    @torch.no_grad()
    def run(self, steps: int) -> None:
        """Score batches."""
        for _ in range(steps):
            with self.fabric.autocast():
                self.hmm.log_likelihood(self.batches[self.done % len(self.batches)])
            self.done += 1


def make_steps(row: Row, options: argparse.Namespace, fabric: Fabric) -> Any:
    """Return what runs the steps of a row."""
    if row.kind == "evaluation":
        return Evaluation(row, fabric)
    if row.kind == "neural":
        return Steps(make_neural(row), ADAMW, options, fabric)
    return Training(row.kind, "auto", options, fabric)


def make_neural(row: Row) -> Neural:
    """Return the network of the recipe ptb-vl-hmm, with words in blocks in turn."""
    blocks = Blocks.from_clusters(torch.arange(row.vocab) % BLOCKS, row.states)
    generator = torch.Generator().manual_seed(0)
    return Neural(blocks, hidden=HIDDEN, form="printed", dropout=row.dropout, generator=generator)


# --- peers ---


def bare_run(row: Row, device: torch.device, dtype: torch.dtype) -> Run:
    """Return the products that a step cannot avoid."""
    if row.kind == "neural":
        kept = int(row.states * (1 - row.dropout))
        u, w = (torch.randn(kept, HIDDEN, device=device).to(dtype) for _ in range(2))
        pieces = u.split(4096)

        def step() -> None:  # the normalizer and its gradients, without a [Z, Z] matrix
            total = torch.zeros_like(w)
            for piece in pieces:
                scores = piece @ w.t()
                scores @ w
                total.addmm_(scores.t(), piece)

    else:
        transition = torch.full((row.states, row.states), 1 / row.states, device=device, dtype=dtype)
        forward, both = products(transition, row.batch, row.length)
        step = forward if row.kind == "evaluation" else both  # type: ignore[assignment]
    return graphed(step, device)


def drawn_run(row: Row, device: torch.device, dtype: torch.dtype) -> Run | None:
    """Return the products of a dense step on random values; None for a network, whose bare products are of such."""
    if row.kind == "neural":
        return None
    transition = torch.randn(row.states, row.states, device=device).softmax(1).to(dtype)
    messages = torch.rand(row.length, row.batch, row.states, device=device).to(dtype)
    result = torch.empty_like(messages[0])

    def step() -> None:
        for message in messages[1:]:
            torch.mm(message, transition, out=result)
        if row.kind != "evaluation":
            for message in messages[1:]:
                torch.mm(message, transition.t(), out=result)
            messages[:-1].view(-1, row.states).t() @ messages[1:].view(-1, row.states)

    return graphed(step, device)


def autograd_run(row: Row, device: torch.device) -> Run | None:
    """Return gradients of the loop in log space; None if it does not fit or is no dense training step."""
    if row.kind in ("evaluation", "neural") or row.tokens * row.states**2 > LOOP_CELLS:
        return None
    shapes = ((row.states,), (row.states, row.states), (row.states, row.vocab))
    leaves = [torch.randn(shape, device=device).log_softmax(-1).requires_grad_() for shape in shapes]
    tokens = draw_tokens(row.batch, row.length, row.vocab, device)

    def run(steps: int) -> None:
        for _ in range(steps):
            torch.autograd.grad(log_likelihood(*leaves, tokens).sum(), leaves)

    return run


def pyjuice_run(row: Row, options: argparse.Namespace, device: torch.device) -> Run | None:
    """Return EM steps of PyJuice; None if it is not installed or too slow for the row."""
    if not installed("pyjuice") or row.kind not in ("scalar", "em") or row.states > 4096:
        return None
    from benchmarks.pyjuice_step import PyJuice

    return PyJuice(options, device).run


def graphed(step: Callable[[], Any], device: torch.device) -> Run:
    """Return `step` as a CUDA graph, or itself on a CPU."""
    step()
    replay: Callable[[], Any] = step
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay

    def run(steps: int) -> None:
        for _ in range(steps):
            replay()

    return run


# --- measurements ---


def step_seconds(run: Run, cuda: bool, rounds: int = ROUNDS, seconds: float | None = None) -> float:
    """Return the median over rounds, of ROUND_SECONDS or as given, of the mean time of a step."""

    def once(steps: int) -> float:
        if cuda:
            return seconds_on_gpu(run, steps)
        began = time.perf_counter()
        run(steps)
        return (time.perf_counter() - began) / steps

    steps = max(1, int((seconds or ROUND_SECONDS) / once(1)))
    return statistics.median(once(steps) for _ in range(rounds))


def peer_ms(run: Run | None, cuda: bool) -> float | None:
    """Return the time of a peer's step in ms; None if there is none, or it does not fit."""
    if run is None:
        return None
    try:
        run(1)
        return 1e3 * step_seconds(run, cuda, PEER_ROUNDS)
    except torch.cuda.OutOfMemoryError:
        return None


def blocked_errors(row: Row, device: torch.device, spread: float) -> dict[str, float]:
    """Return the relative errors of the blocked scan in bfloat16 against float64."""
    kept, batch, length = int(row.states * (1 - row.dropout)), min(row.batch, 8), min(row.length, 16)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    size = (spread / HIDDEN**0.5) ** 0.5  # logits u · w then have this standard deviation
    u, w = (draw(kept, HIDDEN).mul(size).bfloat16().float() for _ in range(2))
    normalizer = torch.cat([(piece @ w.double().t()).logsumexp(1) for piece in u.double().split(1024)])
    rest = draw(kept).log_softmax(0), (spread * draw(row.vocab, kept // BLOCKS)).log_softmax(1)
    block_of_word = torch.arange(row.vocab, device=device) % BLOCKS
    tokens = draw_tokens(batch, length, row.vocab, device)
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in (u, w, normalizer, *rest)]
        factors = Factors(block_of_word, *leaves)
        if not refusal(torch.device(device), dtype):
            result = blocked_scan(factors, tokens, product_dtype=torch.bfloat16)
        else:
            result = generic_scan(from_factors(factors), tokens)
        gradients = torch.autograd.grad(result.log_likelihood.sum(), leaves)
        found.append([result.log_likelihood.detach(), *gradients])
    names = ("log_likelihood", "u", "w", "log_normalizer", "start", "emission")
    return {n: float((a.double() - b).norm() / b.norm()) for n, a, b in zip(names, *found, strict=True)}


def errors(row: Row, options: argparse.Namespace, fabric: Fabric, precision: str) -> dict[str, float]:
    """Return the errors of likelihood and gradient against float64, for flat and for peaked parameters."""
    result = {}
    for name, spread in (("", 1.0), ("_peaked", PEAKED)):
        torch.manual_seed(1)
        if row.kind == "neural":
            found = blocked_errors(row, fabric.device, spread)
        else:
            found = check(options, fabric.device, precision, spread)
        likelihood = found.pop("log_likelihood")
        found.pop("carry", None)
        result |= {f"log_likelihood_error{name}": likelihood, f"gradient_error{name}": max(found.values())}
    return result


def measure(row: Row, options: argparse.Namespace, fabric: Fabric, precision: str) -> tuple[dict[str, Any], Any]:
    """Return the metrics of a row, and its steps."""
    cuda = fabric.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    steps = make_steps(row, options, fabric)
    seconds = step_seconds(steps.run, cuda)
    memory = torch.cuda.max_memory_allocated() / 1e9 if cuda else None
    products_in = torch.bfloat16 if cuda else torch.float32
    bare = peer_ms(bare_run(row, fabric.device, products_in), cuda)
    peers = {
        "bare_products_ms": bare,
        "drawn_products_ms": peer_ms(drawn_run(row, fabric.device, products_in), cuda),
        "autograd_ms": peer_ms(autograd_run(row, fabric.device), cuda),
        "pyjuice_ms": peer_ms(pyjuice_run(row, options, fabric.device), cuda),
        "paper_ms": row.paper_ms,
    }
    metrics = {
        "tokens_per_second": round(row.tokens / seconds),
        "step_ms": 1e3 * seconds,
        "peak_memory_gb": memory,
        "times_bare_products": None if bare is None else 1e3 * seconds / bare,
        **peers,
    }
    return {name: value for name, value in metrics.items() if value is not None}, steps


# --- profile ---


class Limits(NamedTuple):
    """What the device can do, measured."""

    bytes_per_second: float
    flop_per_second: float


def device_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Measure a copy and a matrix product."""
    cuda = device.type == "cuda"
    cells, side = (2**28, 8192) if cuda else (2**24, 1024)
    source, target = torch.zeros(cells, device=device), torch.empty(cells, device=device)
    a = torch.zeros(side, side, device=device, dtype=dtype)
    copying = step_seconds(graphed(lambda: target.copy_(source), device), cuda, 3)
    multiplying = step_seconds(graphed(lambda: a @ a, device), cuda, 3)
    return Limits(2 * 4 * cells / copying, 2 * side**3 / multiplying)


def least_work(row: Row) -> tuple[float, float]:
    """Return the bytes that a step has to read and write, and its FLOP."""
    if row.kind == "neural":
        kept = int(row.states * (1 - row.dropout))
        parameters = (row.states + row.vocab) * HIDDEN
        return 4 * 7 * parameters, 2 * 3 * kept**2 * HIDDEN
    matrices = row.states * (row.states + row.vocab)
    messages = row.tokens * row.states
    flop = 2.0 * row.tokens * row.states**2
    if row.kind == "evaluation":
        return 4.0 * (row.states**2 + 2 * messages), flop
    # AdamW reads parameters, gradients and two moments and writes three of them; Baum-Welch reads and writes one table.
    touched = 7 if row.kind == "scalar" else 3
    return 4.0 * (touched * matrices + 4 * messages), 3 * flop


def profile_table(name: str, row: Row, steps: Any, step_ms: float, limits: Limits) -> str:
    """Return the kernels of a step, with what limits it."""
    found = kernels(steps)
    total = sum(spent for spent, _, _ in found)
    size, flop = least_work(row)
    lines = [
        f"{spent:10.1f} {100 * spent / total:6.1f} {count:6d}  {kernel[:90]}" for spent, count, kernel in found[:25]
    ]
    return "\n".join(
        [
            f"## {name}: {step_ms:.3f} ms per step, {total / 1e3:.3f} ms in kernels",
            f"at least {size / 1e9:.3f} GB ({1e3 * size / limits.bytes_per_second:.3f} ms at the measured "
            f"{limits.bytes_per_second / 1e12:.2f} TB/s: {100 * size / limits.bytes_per_second / (step_ms / 1e3):.0f}% "
            f"of the step), {flop / 1e12:.3f} TFLOP ({1e3 * flop / limits.flop_per_second:.3f} ms at "
            f"{limits.flop_per_second / 1e12:.0f} TFLOP/s: "
            f"{100 * flop / limits.flop_per_second / (step_ms / 1e3):.0f}%)",
            f"{'µs':>10} {'%':>6} {'calls':>6}  kernel",
            *lines,
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure the chosen rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help="; ".join(ROWS))
    parser.add_argument("--out", type=Path, default=Path("results/speed.json"))
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a table of kernels per row")
    parser.add_argument("--small", action="store_true", help="tiny models, to test the script on any machine")
    given = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    precision = "bf16-mixed" if cuda else "32-true"
    fabric = Fabric(accelerator="cuda" if cuda else "cpu", devices=1, precision=precision)
    limits = device_limits(fabric.device, torch.bfloat16 if cuda else torch.float32) if given.profile else None
    tables = []
    for name in given.rows:
        row = shrink(ROWS[name]) if given.small else ROWS[name]
        options = argparse.Namespace(**row._asdict())
        began = time.perf_counter()
        metrics, steps = measure(row, options, fabric, precision)
        if limits is not None:
            tables.append(profile_table(name, row, steps, metrics["step_ms"], limits))
        del steps
        metrics |= errors(row, options, fabric, precision)
        metrics = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in metrics.items()}
        print(f"{name} ({time.perf_counter() - began:.0f} s)", metrics, flush=True)
        add_record(
            given.out,
            {
                "row": name,
                "recipe": "benchmarks/speed.py",
                "metrics": metrics,
                "seed": 0,
                "settings": {"batch": row.batch, "length": row.length, "words": row.vocab, "states": row.states},
                "command": f'python -m benchmarks.speed --rows "{name}"',
                "commit": commit(),
                "machine": machine(cuda),
                "date": time.strftime("%Y-%m-%d"),
                "note": f"median of {ROUNDS} rounds; peers in the same process, of {PEER_ROUNDS}",
            },
        )
    if given.profile is not None:
        given.profile.write_text("\n".join(tables))


if __name__ == "__main__":
    main()
