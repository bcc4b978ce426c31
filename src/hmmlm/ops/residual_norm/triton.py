"""GPU kernels for everything between the products; each row is read once, as a whole.

For sums over rows (gradients of the biases and of the norm's scale and shift), each program writes one row of partial
sums. These are added in a fixed order, without atomics, so results are deterministic.
"""
# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers)

import torch
import triton
import triton.language as tl
from torch import Tensor

_CELLS = 2048  # elements of each operand that a program holds at once: 16 per thread
_ROWS = 32  # rows that a program sums over; 16,384 rows give 512 programs, several per multiprocessor
_WARPS = 4
_SUM = {"BLOCK_N": 128, "BLOCK_COLUMNS": 32, "num_warps": 8}


@triton.jit
def _normalized(before, inner, in_row, EPS: tl.constexpr, H: tl.constexpr):
    """Return the normalized rows before scale and shift [rows, h], and 1/σ [rows, 1]."""
    total = tl.where(before <= 0, 0.0, before) + inner  # keeps NaN, like PyTorch's ReLU
    centered = tl.where(in_row, total - (tl.sum(total, 1) / H)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 1) / H + EPS)[:, None]
    return centered * scale, scale


@triton.jit
def _norm_kernel(
    before,
    inner,
    gamma,
    beta,
    out,
    n,
    EPS: tl.constexpr,
    H: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per block of rows: out = LN(ReLU(before) + inner)·gamma + beta."""
    rows, columns = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_H)
    at = rows[:, None].to(tl.int64) * H + columns[None, :]
    in_row = (columns < H)[None, :]
    inside = (rows < n)[:, None] & in_row
    x = tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(inner + at, mask=inside, other=0.0).to(tl.float32)
    normalized, _ = _normalized(x, d, in_row, EPS, H)
    scale = tl.load(gamma + columns, mask=columns < H, other=0.0)[None, :]
    shift = tl.load(beta + columns, mask=columns < H, other=0.0)[None, :]
    tl.store(out + at, normalized * scale + shift, mask=inside)


@triton.jit
def _norm_backward_kernel(
    grad,
    before,
    inner,
    gamma,
    grad_sum,
    grad_before,
    sums,
    n,
    EPS: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per ROWS rows: gradients of the norm's input and of `before`, and partial sums for parameters."""
    columns = tl.arange(0, BLOCK_H)
    in_row = (columns < H)[None, :]
    scale = tl.load(gamma + columns, mask=columns < H, other=0.0)[None, :]
    grad_bias = tl.zeros([BLOCK_ROWS, BLOCK_H], tl.float32)
    grad_gamma = tl.zeros([BLOCK_ROWS, BLOCK_H], tl.float32)
    grad_beta = tl.zeros([BLOCK_ROWS, BLOCK_H], tl.float32)
    for first in range(0, ROWS, BLOCK_ROWS):
        rows = tl.program_id(0) * ROWS + first + tl.arange(0, BLOCK_ROWS)
        at = rows[:, None].to(tl.int64) * H + columns[None, :]
        inside = (rows < n)[:, None] & in_row
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(inner + at, mask=inside, other=0.0).to(tl.float32)
        normalized, over_sigma = _normalized(x, d, in_row, EPS, H)
        grad_gamma += g * normalized
        grad_beta += g
        g *= scale
        along = (tl.sum(g * normalized, 1) / H)[:, None]
        g = (g - (tl.sum(g, 1) / H)[:, None] - normalized * along) * over_sigma
        through = tl.where(x > 0, g, 0.0)
        grad_bias += through
        tl.store(grad_sum + at, g, mask=inside)
        tl.store(grad_before + at, through, mask=inside)
    mine = sums + tl.program_id(0) * 3 * H + columns
    tl.store(mine, tl.sum(grad_bias, 0), mask=columns < H)
    tl.store(mine + H, tl.sum(grad_gamma, 0), mask=columns < H)
    tl.store(mine + 2 * H, tl.sum(grad_beta, 0), mask=columns < H)


@triton.jit
def _relu_backward_kernel(
    grad, value, sums, n, H: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr
):
    """One program per ROWS rows: set grad to zero where value ≤ 0, and compute its partial sums."""
    columns = tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_ROWS, BLOCK_H], tl.float32)
    for first in range(0, ROWS, BLOCK_ROWS):
        rows = tl.program_id(0) * ROWS + first + tl.arange(0, BLOCK_ROWS)
        at = rows[:, None].to(tl.int64) * H + columns[None, :]
        inside = (rows < n)[:, None] & (columns < H)[None, :]
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.where(tl.load(value + at, mask=inside, other=0.0).to(tl.float32) > 0, g, 0.0)
        total += g
        tl.store(grad + at, g, mask=inside)
    tl.store(sums + tl.program_id(0) * H + columns, tl.sum(total, 0), mask=columns < H)


@triton.jit
def _sum_kernel(partial, out, n, N_COLUMNS, BLOCK_N: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """One program per block of columns: out = Σ_n partial [n, N_COLUMNS]."""
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (columns < N_COLUMNS)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_COLUMNS], tl.float32)
    for first in range(0, n, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        at = partial + rows[:, None].to(tl.int64) * N_COLUMNS + columns[None, :]
        total += tl.load(at, mask=(rows < n)[:, None] & inside, other=0.0)
    tl.store(out + columns, tl.sum(total, 0), mask=columns < N_COLUMNS)


def _sum(partial: Tensor) -> Tensor:
    """Compute the sum over the first axis; that of torch takes 12 µs for the few hundred rows that there are."""
    out = partial.new_empty(partial.shape[1:])
    grid = (triton.cdiv(out.numel(), _SUM["BLOCK_COLUMNS"]),)
    _sum_kernel[grid](partial, out, len(partial), out.numel(), **_SUM)
    return out


def _block(h: int) -> dict[str, int]:
    block_h = triton.next_power_of_2(h)
    return {"H": h, "BLOCK_H": block_h, "BLOCK_ROWS": min(_ROWS, max(1, _CELLS // block_h)), "num_warps": _WARPS}


def norm(before: Tensor, inner: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Compute LN(ReLU(before) + inner)·gamma + beta [n, h] in float32."""
    n, h = before.shape
    out, block = torch.empty_like(before, dtype=torch.float32), _block(h)
    if n:
        grid = (triton.cdiv(n, block["BLOCK_ROWS"]),)
        _norm_kernel[grid](before, inner, gamma, beta, out, n, EPS=eps, **block)
    return out


def norm_backward(
    grad: Tensor, before: Tensor, inner: Tensor, gamma: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of the norm's input and of `before` [n, h], and of before's bias, gamma and beta [3, h]."""
    n, h = before.shape
    grad_sum, grad_before = torch.empty_like(before), torch.empty_like(before)
    programs = triton.cdiv(n, _ROWS)
    sums = gamma.new_empty(programs, 3, h)
    if n:
        _norm_backward_kernel[(programs,)](
            grad, before, inner, gamma, grad_sum, grad_before, sums, n, EPS=eps, ROWS=_ROWS, **_block(h)
        )
    return grad_sum, grad_before, _sum(sums)


def relu_backward_(grad: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Turn grad [n, h] of value = ReLU(x) into that of x, in place; also return its sum over rows [h] in float32."""
    n, h = grad.shape
    programs = triton.cdiv(n, _ROWS)
    sums = grad.new_empty(programs, h, dtype=torch.float32)
    if n:
        _relu_backward_kernel[(programs,)](grad, value, sums, n, ROWS=_ROWS, **_block(h))
    return grad, _sum(sums)
