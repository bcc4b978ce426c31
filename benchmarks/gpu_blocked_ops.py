"""Check and time the GPU kernels of linear_logsumexp and blocked_scan.

    PYTHONPATH=src python benchmarks/gpu_blocked_ops.py --out blocked_ops.json [--sweep]

Checks compare with the portable implementation in float64 on fresh random inputs, rounded to the dtype of products
first: what is left is the error of the kernel. Times are medians of CUDA graph replays. With --sweep every tile size
that was considered is timed as well.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hmmlm.ops.blocked_scan import Initial, blocked_scan
from hmmlm.ops.blocked_scan import triton as scan_kernels
from hmmlm.ops.blocked_scan.problem import lay_out
from hmmlm.ops.linear_logsumexp import linear_logsumexp
from hmmlm.ops.linear_logsumexp import triton as linear_kernels

DEVICE = "cuda"
RESULTS: list[dict[str, Any]] = []


def report(**row: Any) -> None:
    RESULTS.append(row)
    print("  ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def milliseconds(function: Callable[[], Any], replays: int = 30) -> float:
    """Median time of a replay of `function` as a CUDA graph."""
    torch.cuda.synchronize()  # the inputs are there before another stream reads them
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


def factors(n: int, m: int, h: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors whose scores have a standard deviation of about 2."""
    return tuple(rounded(torch.randn(k, h, device=DEVICE) * (2 / h**0.5) ** 0.5, dtype) for k in (n, m))  # type: ignore[return-value]


def check_linear(n: int, m: int, h: int, dtype: torch.dtype, with_bias: bool) -> None:
    given = [*factors(n, m, h, dtype), *([torch.randn(m, device=DEVICE)] if with_bias else [])]
    weight = torch.randn(n, device=DEVICE)
    found: dict[str, list[Tensor]] = {}
    for impl, exact in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [x.to(exact, copy=True).requires_grad_() for x in given]
        product = dtype if impl == "triton" else torch.float64
        out = linear_logsumexp(*leaves, impl=impl, product_dtype=product)  # type: ignore[arg-type]
        (out * weight).sum().backward()
        found[impl] = [out.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]
    errors = [error(a, b) for a, b in zip(found["triton"], found["torch"], strict=True)]
    names = ("value", "grad_u", "grad_w", "grad_bias")
    report(op="linear_logsumexp", check=f"{n}x{m}x{h}", dtype=str(dtype)[6:], **dict(zip(names, errors, strict=False)))


def time_linear(n: int, h: int, dtype: torch.dtype, replays: int = 30) -> None:
    u, w = (x.to(dtype) for x in factors(n, n, h, dtype))
    grad = torch.rand(n, device=DEVICE)
    out = linear_kernels.forward(u, w, None)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_kernels.backward(grad, u, w, None, out)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    report(
        op="linear_logsumexp", size=f"{n}x{n}x{h}", dtype=str(dtype)[6:],
        forward_ms=milliseconds(lambda: linear_kernels.forward(u, w, None), replays),
        backward_ms=milliseconds(lambda: linear_kernels.backward(grad, u, w, None, out), replays), peak_mb=peak,
    )  # fmt: skip


def sweep_linear(n: int, h: int) -> None:
    u, w = (x.bfloat16() for x in factors(n, n, h, torch.bfloat16))
    grad = torch.rand(n, device=DEVICE)
    out = linear_kernels.forward(u, w, None)
    tiles = {
        "forward": [(128, 128, 256, 8, 2), (128, 128, 256, 4, 2), (128, 64, 256, 4, 3), (128, 64, 256, 8, 3),
                    (128, 256, 64, 8, 3), (128, 256, 256, 8, 1)],
        "backward": [(128, 64, 256, 8, 2), (128, 64, 256, 8, 3), (128, 64, 256, 8, 4), (64, 64, 256, 4, 2),
                     (64, 128, 256, 4, 2), (128, 32, 256, 8, 4)],
    }  # fmt: skip
    for kernel, choices in tiles.items():
        for block, across, block_h, warps, stages in choices:
            names = ("BLOCK_ROWS", "BLOCK_COLUMNS") if kernel == "forward" else ("BLOCK_OWN", "BLOCK_OTHER")
            tile = {names[0]: block, names[1]: across, "BLOCK_H": block_h, "PRECISION": "ieee", "num_warps": warps,
                    "num_stages": stages}  # fmt: skip
            with setting(linear_kernels, _tile=lambda *_, tile=tile: tile):
                timed = time_or_say(
                    lambda: linear_kernels.forward(u, w, None) if kernel == "forward"  # noqa: B023
                    else linear_kernels.backward(grad, u, w, None, out)
                )  # fmt: skip
            report(op="linear_logsumexp", sweep=kernel, tile=f"{block}x{across}x{block_h}", warps=warps, stages=stages,
                   ms=timed)  # fmt: skip


def time_or_say(function: Callable[[], Any]) -> float | str:
    try:
        return milliseconds(function)
    except Exception as problem:  # a tile that does not fit the machine
        torch.cuda.synchronize()
        return type(problem).__name__


# blocked_scan


def blocked_case(
    batch: int, time: int, blocks: int, kept: int, h: int, words: int, then: int, dtype: torch.dtype, ragged: bool
) -> dict[str, Any]:
    """Words drawn by Zipf's law, as in text: blocks then repeat within a batch as they do in training."""
    zipf = 1 / torch.arange(1, words + 1, device=DEVICE)
    block_of_word = torch.cat([torch.arange(blocks), torch.randint(blocks, (words - blocks,))]).to(DEVICE)
    u, w = factors(blocks * kept, blocks * kept, h, dtype)
    u_then, _ = factors(batch * then, 1, h, dtype)
    log_emission = torch.randn(words, kept, device=DEVICE) - 4
    return {
        "tokens": torch.multinomial(zipf, batch * time, replacement=True).view(batch, time),
        "block_of_word": block_of_word,
        "parameters": [u, w, linear_logsumexp(u, w), torch.randn(blocks * kept, device=DEVICE).log_softmax(0),
                       log_emission],
        "carried": [torch.rand(batch, then, device=DEVICE).softmax(1), u_then.view(batch, then, h),
                    linear_logsumexp(u_then, w).view(batch, then)],
        "lengths": torch.randint(1, time + 1, (batch,), device=DEVICE) if ragged else None,
        "restart": torch.rand(batch, time, device=DEVICE) < 0.05,
    }  # fmt: skip


def check_scan(*size: int, dtype: torch.dtype, ragged: bool) -> None:
    case = blocked_case(*size, dtype=dtype, ragged=ragged)  # type: ignore[misc]
    weight = torch.randn(size[0], device=DEVICE)
    found: dict[str, list[Tensor]] = {}
    for impl, exact in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [x.to(exact, copy=True).requires_grad_() for x in (*case["parameters"], *case["carried"])]
        result = blocked_scan(
            case["tokens"], case["block_of_word"], *leaves[:5], initial=Initial(*leaves[5:]), lengths=case["lengths"],
            restart=case["restart"], product_dtype=dtype if impl == "triton" else torch.float64, impl=impl,
        )  # fmt: skip
        (result.log_likelihood * weight).sum().backward()
        found[impl] = [result.log_likelihood.detach(), result.final, *(x.grad for x in leaves)]  # type: ignore[misc]
    names = ("value", "final", "u", "w", "normalizer", "start", "emission", "initial", "initial_u", "initial_norm")
    errors = [error(a, b) for a, b in zip(found["triton"], found["torch"], strict=True)]
    report(op="blocked_scan", check="x".join(map(str, size)), dtype=str(dtype)[6:],
           **dict(zip(names, errors, strict=True)))  # fmt: skip


def time_scan(*size: int, dtype: torch.dtype, label: str = "", parts: bool = False) -> None:
    case = blocked_case(*size, dtype=dtype, ragged=False)  # type: ignore[misc]
    leaves = [x.clone().requires_grad_() for x in (*case["parameters"], *case["carried"][1:])]
    initial = Initial(case["carried"][0], *leaves[5:])

    def forward() -> Tensor:
        return blocked_scan(case["tokens"], case["block_of_word"], *leaves[:5], initial=initial,
                            restart=case["restart"], product_dtype=dtype, impl="triton").log_likelihood  # fmt: skip

    def both() -> None:
        torch.autograd.grad(forward().sum(), leaves)

    with torch.no_grad():
        problem = lay_out(case["tokens"], case["block_of_word"], *case["parameters"], Initial(*case["carried"]), None,
                          case["restart"], dtype)  # fmt: skip
        state = scan_kernels.forward(problem)
    grad = torch.ones(size[0], device=DEVICE)
    row: dict[str, Any] = {"op": "blocked_scan", "size": "x".join(map(str, size)), "dtype": str(dtype)[6:]}
    if label:
        row["label"] = label
    row["forward_kernels_ms"] = milliseconds(lambda: scan_kernels.forward(problem))
    row["backward_kernels_ms"] = milliseconds(lambda: scan_kernels.backward(problem, state, grad))
    if parts:
        time = size[1]
        row["tiles_ms"] = milliseconds(lambda: scan_kernels._tiles(problem, 0, time))
        row["segments_ms"] = milliseconds(lambda: scan_kernels._segments(problem, 0, time))
    row["forward_ms"], row["forward_backward_ms"] = milliseconds(forward), milliseconds(both)
    report(**row)


def recursions(*size: int) -> Callable[[], Any]:
    """Both directions of the recursion and all that goes with them."""
    case = blocked_case(*size, dtype=torch.bfloat16, ragged=False)  # type: ignore[misc]
    problem = lay_out(case["tokens"], case["block_of_word"], *case["parameters"], Initial(*case["carried"]), None,
                      case["restart"], torch.bfloat16)  # fmt: skip
    grad = torch.ones(size[0], device=DEVICE)
    return lambda: scan_kernels.backward(problem, scan_kernels.forward(problem), grad)


def sweep_scan(*size: int) -> None:
    for chunk, warps, stages in itertools.product((8192, 16384, 32768), (8, 16), (1, 3, 4)):
        with setting(scan_kernels, _TILE_AT_ONCE=0, _IN_CHUNKS={"chunk": chunk, "warps": warps, "stages": stages}):
            label = f"chunk {chunk} warps {warps} stages {stages}"
            report(op="blocked_scan", sweep="recursion", size="x".join(map(str, size)), label=label,
                   ms=time_or_say(recursions(*size)))  # fmt: skip
    for own, other, inner, warps in ((64, 64, 128, 4), (128, 64, 128, 8), (128, 128, 128, 8), (64, 64, 256, 4),
                                     (64, 128, 128, 4)):  # fmt: skip
        tile = {"BLOCK_OWN": own, "BLOCK_OTHER": other, "BLOCK_H": inner, "num_warps": warps}
        with setting(scan_kernels, _FACTOR_TILE=tile):
            time_scan(*size, dtype=torch.bfloat16, label=f"factor tile {own}x{other}x{inner} warps {warps}")
    for piece in (4, 16):
        with setting(scan_kernels, _PIECE=piece):
            time_scan(*size, dtype=torch.bfloat16, label=f"piece {piece}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--sweep", action="store_true", help="time every tile size that was considered")
    options = parser.parse_args()
    report(seed=torch.seed(), device=torch.cuda.get_device_name(), torch=torch.__version__)  # a new seed every time
    bf16, fp32 = torch.bfloat16, torch.float32
    try:
        for arguments in ((4096, 8192, 256, bf16, False), (1000, 3001, 100, bf16, True), (700, 900, 512, bf16, False),
                          (1000, 3001, 100, fp32, True), (2048, 2048, 256, fp32, False)):  # fmt: skip
            check_linear(*arguments)
        for size, dtype, ragged in (((16, 32, 128, 128, 256, 10000, 128), bf16, False),
                                    ((16, 32, 128, 128, 256, 10000, 128), fp32, True),
                                    ((5, 9, 7, 100, 70, 500, 90), bf16, True),
                                    ((5, 9, 7, 90, 70, 500, 100), fp32, True),
                                    ((4, 6, 8, 1024, 256, 100, 1024), bf16, True)):  # fmt: skip
            check_scan(*size, dtype=dtype, ragged=ragged)
        if options.sweep:
            sweep_linear(16384, 256)
            for kept in (128, 256, 1024):
                sweep_scan(16, 32, 128 if kept <= 256 else 32, kept, 256, 10000, kept)
        time_linear(16384, 256, bf16)
        time_linear(32768, 256, bf16)
        time_linear(16384, 256, fp32)
        time_linear(2**18, 256, bf16, replays=2)
        for kept, dtype in ((128, bf16), (128, fp32), (256, bf16), (512, bf16), (1024, bf16)):
            time_scan(16, 32, 128 if kept <= 256 else 32, kept, 256, 10000, kept, dtype=dtype, parts=True)
    finally:
        options.out.write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
