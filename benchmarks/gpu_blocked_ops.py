"""Check and time the GPU kernels of linear_logsumexp and blocked_scan.

    PYTHONPATH=src python benchmarks/gpu_blocked_ops.py --out blocked_ops.json [--sweep]

Checks compare with the portable implementation in float64 on fresh random inputs. The inputs are first rounded to the
dtype of products, so the difference is the error of the kernel. Times are medians of CUDA graph replays. --sweep also
times every tile size that was considered.
"""

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hmmlm.models.base import from_factors
from hmmlm.ops.blocked_scan import Factors, blocked_scan
from hmmlm.ops.blocked_scan import triton as scan_kernels
from hmmlm.ops.blocked_scan.problem import BlockedProblem, lay_out
from hmmlm.ops.linear_logsumexp import linear_logsumexp
from hmmlm.ops.linear_logsumexp import triton as linear_kernels
from hmmlm.scan.generic_scan import generic_scan

DEVICE = "cuda"
RESULTS: list[dict[str, Any]] = []


def report(**row: Any) -> None:
    """Record and print one row of results."""
    RESULTS.append(row)
    print("  ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def error(got: Tensor, want: Tensor) -> float:
    """Return the relative error in the Euclidean norm."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def milliseconds(function: Callable[[], Any], replays: int = 30) -> float:
    """Return the median time of replaying `function` as a CUDA graph."""
    torch.cuda.synchronize()  # inputs must be complete before another stream reads them
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


@contextmanager
def setting(module: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a module temporarily."""
    before = {k: getattr(module, k) for k in values}
    try:
        for k, v in values.items():
            setattr(module, k, v)
        yield
    finally:
        for k, v in before.items():
            setattr(module, k, v)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


# linear_logsumexp


def random_factors(n: int, m: int, h: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return factors u [n, h] and w [m, h] whose scores have a standard deviation of about 2."""
    return tuple(rounded(torch.randn(k, h, device=DEVICE) * (2 / h**0.5) ** 0.5, dtype) for k in (n, m))  # type: ignore[return-value]


def check_linear(n: int, m: int, h: int, dtype: torch.dtype, with_bias: bool) -> None:
    """Report the errors of linear_logsumexp and its gradients."""
    given = [*random_factors(n, m, h, dtype), *([torch.randn(m, device=DEVICE)] if with_bias else [])]
    weight = torch.randn(n, device=DEVICE)
    found: dict[str, list[Tensor]] = {}
    for impl, exact in (("triton", torch.float32), ("chunked", torch.float64)):
        leaves = [x.to(exact, copy=True).requires_grad_() for x in given]
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = linear_logsumexp(*leaves)
        (out * weight).sum().backward()
        found[impl] = [out.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]
    errors = [error(a, b) for a, b in zip(found["triton"], found["chunked"], strict=True)]
    names = ("value", "grad_u", "grad_w", "grad_bias")
    report(op="linear_logsumexp", check=f"{n}x{m}x{h}", dtype=str(dtype)[6:], **dict(zip(names, errors, strict=False)))


def time_linear(n: int, h: int, dtype: torch.dtype, replays: int = 30) -> None:
    """Report time and peak memory of linear_logsumexp for n × n scores."""
    u, w = (x.to(dtype) for x in random_factors(n, n, h, dtype))
    grad = torch.rand(n, device=DEVICE)
    out = linear_kernels.forward(u, w, None)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_kernels.backward(grad, u, w, None, out)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    report(
        op="linear_logsumexp",
        size=f"{n}x{n}x{h}",
        dtype=str(dtype)[6:],
        forward_ms=milliseconds(lambda: linear_kernels.forward(u, w, None), replays),
        backward_ms=milliseconds(lambda: linear_kernels.backward(grad, u, w, None, out), replays),
        peak_mb=peak,
    )


def sweep_linear(n: int, h: int) -> None:
    """Report the time of linear_logsumexp for every tile size that was considered."""
    u, w = (x.bfloat16() for x in random_factors(n, n, h, torch.bfloat16))
    grad = torch.rand(n, device=DEVICE)
    out = linear_kernels.forward(u, w, None)
    tiles = {
        "forward": [
            (128, 128, 256, 8, 2),
            (128, 128, 256, 4, 2),
            (128, 64, 256, 4, 3),
            (128, 64, 256, 8, 3),
            (128, 256, 64, 8, 3),
            (128, 256, 256, 8, 1),
        ],
        "backward": [
            (128, 64, 256, 8, 2),
            (128, 64, 256, 8, 3),
            (128, 64, 256, 8, 4),
            (64, 64, 256, 4, 2),
            (64, 128, 256, 4, 2),
            (128, 32, 256, 8, 4),
        ],
    }
    for kernel, choices in tiles.items():
        for block, across, block_h, warps, stages in choices:
            names = ("BLOCK_ROWS", "BLOCK_COLUMNS") if kernel == "forward" else ("BLOCK_OWN", "BLOCK_OTHER")
            tile = {
                names[0]: block,
                names[1]: across,
                "BLOCK_H": block_h,
                "PRECISION": "ieee",
                "num_warps": warps,
                "num_stages": stages,
            }
            with setting(linear_kernels, _tile=lambda *_, tile=tile: tile):
                timed = time_or_name_error(
                    lambda: (
                        linear_kernels.forward(u, w, None)
                        if kernel == "forward"  # noqa: B023
                        else linear_kernels.backward(grad, u, w, None, out)
                    )
                )
            report(
                op="linear_logsumexp",
                sweep=kernel,
                tile=f"{block}x{across}x{block_h}",
                warps=warps,
                stages=stages,
                ms=timed,
            )


def time_or_name_error(function: Callable[[], Any]) -> float | str:
    """Return the time in milliseconds, or the name of the exception."""
    try:
        return milliseconds(function)
    except Exception as problem:  # a tile that does not fit on the GPU
        torch.cuda.synchronize()
        return type(problem).__name__


# blocked_scan


def blocked_case(
    batch: int, time: int, blocks: int, kept: int, h: int, words: int, dtype: torch.dtype, ragged: bool
) -> dict[str, Any]:
    """Return random inputs; words have Zipfian frequencies, so blocks repeat within a batch as in training."""
    zipf = 1 / torch.arange(1, words + 1, device=DEVICE)
    block_of_word = torch.cat([torch.arange(blocks), torch.randint(blocks, (words - blocks,))]).to(DEVICE)
    u, w = random_factors(blocks * kept, blocks * kept, h, dtype)
    log_emission = torch.randn(words, kept, device=DEVICE) - 4
    return {
        "tokens": torch.multinomial(zipf, batch * time, replacement=True).view(batch, time),
        "block_of_word": block_of_word,
        "parameters": [
            u,
            w,
            linear_logsumexp(u, w),
            torch.randn(blocks * kept, device=DEVICE).log_softmax(0),
            log_emission,
        ],
        "entry": torch.randn(batch, 1, kept, device=DEVICE) - math.log(blocks * kept),
        "lengths": torch.randint(1, time + 1, (batch,), device=DEVICE) if ragged else None,
        "restart": torch.rand(batch, time, device=DEVICE) < 0.05,
    }


def check_scan(*size: int, dtype: torch.dtype, ragged: bool) -> None:
    """Report the errors of blocked_scan and its gradients."""
    case = blocked_case(*size, dtype=dtype, ragged=ragged)  # type: ignore[misc]
    weight = torch.randn(size[0], device=DEVICE)
    found: dict[str, list[Tensor]] = {}
    for impl, exact in (("triton", torch.float32), ("generic", torch.float64)):
        leaves = [x.to(exact, copy=True).requires_grad_() for x in (*case["parameters"], case["entry"])]
        factors = Factors(case["block_of_word"], *leaves[:5])
        given = {"entry": leaves[5], "lengths": case["lengths"], "restart": case["restart"]}
        if impl == "triton":
            result = blocked_scan(factors, case["tokens"], product_dtype=dtype, **given)
        else:
            result = generic_scan(from_factors(factors), case["tokens"], **given)
        (result.log_likelihood * weight).sum().backward()
        found[impl] = [result.log_likelihood.detach(), result.carry.log_probs.exp(), *(x.grad for x in leaves)]  # type: ignore[misc]
    names = ("value", "carry", "u", "w", "normalizer", "start", "emission", "entry")
    errors = [error(a, b) for a, b in zip(found["triton"], found["generic"], strict=True)]
    report(
        op="blocked_scan", check="x".join(map(str, size)), dtype=str(dtype)[6:], **dict(zip(names, errors, strict=True))
    )


def time_scan(*size: int, dtype: torch.dtype, label: str = "", parts: bool = False) -> None:
    """Report the time of blocked_scan and of its kernels."""
    case = blocked_case(*size, dtype=dtype, ragged=False)  # type: ignore[misc]
    leaves = [x.clone().requires_grad_() for x in (*case["parameters"], case["entry"])]

    def forward() -> Tensor:
        return blocked_scan(
            Factors(case["block_of_word"], *leaves[:5]),
            case["tokens"],
            entry=leaves[5],
            restart=case["restart"],
            product_dtype=dtype,
        ).log_likelihood

    def both() -> None:
        torch.autograd.grad(forward().sum(), leaves)

    problem = laid_out(case, dtype)
    result = scan_kernels.forward(problem)
    grad = torch.ones(size[0], device=DEVICE)
    row: dict[str, Any] = {"op": "blocked_scan", "size": "x".join(map(str, size)), "dtype": str(dtype)[6:]}
    if label:
        row["label"] = label
    row["forward_kernels_ms"] = milliseconds(lambda: scan_kernels.forward(problem))
    row["backward_kernels_ms"] = milliseconds(lambda: scan_kernels.backward(problem, result, grad))
    if parts:
        time = size[1]
        row["tiles_ms"] = milliseconds(lambda: scan_kernels._tiles(problem, 0, time))
        row["segments_ms"] = milliseconds(lambda: scan_kernels._segments(problem, 0, time))
        with setting(scan_kernels, stray_kernel={(size[0],): lambda *args, **options: None}):
            row["forward_kernels_without_bound_ms"] = milliseconds(lambda: scan_kernels.forward(problem))
    row["forward_ms"], row["forward_backward_ms"] = milliseconds(forward), milliseconds(both)
    report(**row)


def laid_out(case: dict[str, Any], dtype: torch.dtype) -> BlockedProblem:
    """Return a case in the layout of the kernels."""
    factors = Factors(case["block_of_word"], *case["parameters"])
    return lay_out(factors, case["tokens"], case["entry"][:, 0], None, case["restart"], dtype)


def recursions(*size: int) -> Callable[[], Any]:
    """Return a function that runs all kernels of the forward and backward pass."""
    case = blocked_case(*size, dtype=torch.bfloat16, ragged=False)  # type: ignore[misc]
    problem = laid_out(case, torch.bfloat16)
    grad = torch.ones(size[0], device=DEVICE)
    return lambda: scan_kernels.backward(problem, scan_kernels.forward(problem), grad)


def sweep_scan(*size: int) -> None:
    """Report the time of blocked_scan for every tile size that was considered."""
    for chunk, warps, stages in itertools.product((8192, 16384, 32768), (8, 16), (1, 3, 4)):
        with setting(scan_kernels, _TILE_AT_ONCE=0, _IN_CHUNKS={"chunk": chunk, "warps": warps, "stages": stages}):
            label = f"chunk {chunk} warps {warps} stages {stages}"
            report(
                op="blocked_scan",
                sweep="recursion",
                size="x".join(map(str, size)),
                label=label,
                ms=time_or_name_error(recursions(*size)),
            )
    for own, other, inner, warps in (
        (64, 64, 128, 4),
        (128, 64, 128, 8),
        (128, 128, 128, 8),
        (64, 64, 256, 4),
        (64, 128, 128, 4),
    ):
        tile = {"BLOCK_OWN": own, "BLOCK_OTHER": other, "BLOCK_H": inner, "num_warps": warps}
        with setting(scan_kernels, _FACTOR_TILE=tile):
            time_scan(*size, dtype=torch.bfloat16, label=f"factor tile {own}x{other}x{inner} warps {warps}")
    for piece in (4, 16):
        with setting(scan_kernels, _PIECE=piece):
            time_scan(*size, dtype=torch.bfloat16, label=f"piece {piece}")


def main() -> None:
    """Run all checks and timings and write them to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--sweep", action="store_true", help="time every tile size that was considered")
    options = parser.parse_args()
    report(seed=torch.seed(), device=torch.cuda.get_device_name(), torch=torch.__version__)  # a fresh seed per run
    bf16, fp32 = torch.bfloat16, torch.float32
    try:
        for arguments in (
            (4096, 8192, 256, bf16, False),
            (1000, 3001, 100, bf16, True),
            (700, 900, 512, bf16, False),
            (1000, 3001, 100, fp32, True),
            (2048, 2048, 256, fp32, False),
        ):
            check_linear(*arguments)
        for size, dtype, ragged in (
            ((16, 32, 128, 128, 256, 10000), bf16, False),
            ((16, 32, 128, 128, 256, 10000), fp32, True),
            ((5, 9, 7, 100, 70, 500), bf16, True),
            ((5, 9, 7, 90, 70, 500), fp32, True),
            ((4, 6, 8, 1024, 256, 100), bf16, True),
        ):
            check_scan(*size, dtype=dtype, ragged=ragged)
        if options.sweep:
            sweep_linear(16384, 256)
            for kept in (128, 256, 1024):
                sweep_scan(16, 32, 128 if kept <= 256 else 32, kept, 256, 10000)
        time_linear(16384, 256, bf16)
        time_linear(32768, 256, bf16)
        time_linear(16384, 256, fp32)
        time_linear(2**18, 256, bf16, replays=2)
        for kept, dtype in ((128, bf16), (128, fp32), (256, bf16), (512, bf16), (1024, bf16)):
            time_scan(16, 32, 128 if kept <= 256 else 32, kept, 256, 10000, dtype=dtype, parts=True)
    finally:
        options.out.write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
