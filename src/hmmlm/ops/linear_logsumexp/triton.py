"""GPU kernels: a fused forward pass, and a backward pass of one kernel and two library products a slice.

The backward pass writes a slice of the weighted softmax and multiplies it with cuBLAS, rather than recomputing every
tile inside both products: three products instead of four, and the library's are faster than ours.
"""
# mypy: allow-untyped-defs
# (arguments of kernels are pointers and numbers of Triton's own)

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmmlm.ops.linear_logsumexp.precision import accumulate

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_SLICE_ROWS, _SLICE_COLUMNS = 4096, 16384  # of the softmax in the backward pass: 128 MB in bfloat16


@triton.jit
def _scores(u, w, rows, columns, n_rows, n_columns, H: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr):
    """u[rows] · w[columns] as a tile, over h in pieces."""
    scores = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    for first in range(0, H, BLOCK_H):
        inner = first + tl.arange(0, BLOCK_H)
        inside = inner < H
        a = tl.load(
            u + rows[:, None].to(tl.int64) * H + inner[None, :],
            mask=(rows < n_rows)[:, None] & inside[None, :], other=0.0,
        )
        b = tl.load(
            w + columns[None, :].to(tl.int64) * H + inner[:, None],
            mask=(columns < n_columns)[None, :] & inside[:, None], other=0.0,
        )
        scores = tl.dot(a, b, scores, input_precision=PRECISION)
    return scores


@triton.jit
def _forward_kernel(
    u, w, bias, out, n_rows, n_columns,
    H: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program a block of rows: a running maximum and a running sum over tiles of columns."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    largest = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    WHOLE: tl.constexpr = BLOCK_H >= H
    if WHOLE:  # the rows of u fit beside a tile: read them once
        inner = tl.arange(0, BLOCK_H)
        a = tl.load(
            u + rows[:, None].to(tl.int64) * H + inner[None, :],
            mask=(rows < n_rows)[:, None] & (inner < H)[None, :], other=0.0,
        )
    for first in range(0, n_columns, BLOCK_COLUMNS):
        columns = first + tl.arange(0, BLOCK_COLUMNS)
        if WHOLE:
            at = w + columns[None, :].to(tl.int64) * H + inner[:, None]
            if EVEN:
                b = tl.load(at)
            else:
                b = tl.load(at, mask=(columns < n_columns)[None, :] & (inner < H)[:, None], other=0.0)
            scores = tl.dot(a, b, input_precision=PRECISION)
        else:
            scores = _scores(u, w, rows, columns, n_rows, n_columns, H, BLOCK_H, PRECISION)
        if HAS_BIAS:
            scores += tl.load(bias + columns, mask=columns < n_columns, other=0.0)[None, :]
        if not EVEN:
            scores = tl.where((columns < n_columns)[None, :], scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(new_largest == -float("inf"), 0.0, new_largest * _LOG2E)
        total = total * tl.exp2(largest * _LOG2E - shift) + tl.sum(tl.exp2(scores * _LOG2E - shift[:, None]), 1)
        largest = new_largest
    result = tl.where(total > 0, largest + tl.log2(total) * _LN2, -float("inf"))
    tl.store(out + rows, result, mask=rows < n_rows)


@triton.jit
def _softmax_kernel(
    u, w, bias, out, grad, weight, n_rows, n_columns,
    H: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """weight[i, j] = grad_i · softmax_ij, a program a tile."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    scores = _scores(u, w, rows, columns, n_rows, n_columns, H, BLOCK_H, PRECISION)
    if HAS_BIAS:
        scores += tl.load(bias + columns, mask=columns < n_columns, other=0.0)[None, :]
    shift = tl.load(out + rows, mask=rows < n_rows, other=0.0)
    shift = tl.where(shift == -float("inf"), 0.0, shift * _LOG2E)
    scale = tl.load(grad + rows, mask=rows < n_rows, other=0.0)
    values = tl.exp2(scores * _LOG2E - shift[:, None]) * scale[:, None]
    at = weight + rows[:, None].to(tl.int64) * n_columns + columns[None, :]
    tl.store(at, values.to(weight.dtype.element_ty), mask=(rows < n_rows)[:, None] & (columns < n_columns)[None, :])


def _tile(dtype: torch.dtype, h: int, kernel: str) -> dict[str, int | str]:
    """Tile sizes, measured on an H200 for bfloat16 and h = 256; products of float32 are exact to its last bits."""
    if dtype == torch.float32:
        return {
            "BLOCK_ROWS": 64, "BLOCK_COLUMNS": 64, "BLOCK_H": max(16, min(64, triton.next_power_of_2(h))),
            "PRECISION": "tf32x3", "num_warps": 4, "num_stages": 2,
        }
    whole = max(16, triton.next_power_of_2(h))
    if kernel == "forward":
        block_h = whole if whole <= 256 else 64
        return {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128, "BLOCK_H": block_h, "PRECISION": "ieee", "num_warps": 8,
                "num_stages": 2}
    return {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 256, "BLOCK_H": min(64, whole), "PRECISION": "ieee", "num_warps": 8,
            "num_stages": 3}


def forward(u: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """[N] in float32."""
    n, h = u.shape
    out = u.new_empty(n, dtype=torch.float32)
    tile = _tile(u.dtype, h, "forward")
    even = w.shape[0] % int(tile["BLOCK_COLUMNS"]) == 0 and h == triton.next_power_of_2(h) and h >= 16
    if n:
        _forward_kernel[(triton.cdiv(n, int(tile["BLOCK_ROWS"])),)](
            u, w, bias, out, n, w.shape[0], H=h, HAS_BIAS=bias is not None, EVEN=even, **tile
        )
    return out


def backward(
    grad: Tensor, u: Tensor, w: Tensor, bias: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of u, w and bias in float32."""
    n, h = u.shape
    grad_u, grad_w = torch.zeros_like(u, dtype=torch.float32), torch.zeros_like(w, dtype=torch.float32)
    grad_bias = None if bias is None else torch.zeros_like(bias)
    tile = _tile(u.dtype, h, "softmax")
    for left in range(0, w.shape[0], _SLICE_COLUMNS):
        columns = slice(left, min(left + _SLICE_COLUMNS, w.shape[0]))
        for top in range(0, n, _SLICE_ROWS):
            rows = slice(top, min(top + _SLICE_ROWS, n))
            weight = u.new_empty(rows.stop - rows.start, columns.stop - columns.start)
            grid = (
                triton.cdiv(weight.shape[0], int(tile["BLOCK_ROWS"])),
                triton.cdiv(weight.shape[1], int(tile["BLOCK_COLUMNS"])),
            )
            _softmax_kernel[grid](
                u[rows], w[columns], None if bias is None else bias[columns], out[rows], grad[rows], weight,
                *weight.shape, H=h, HAS_BIAS=bias is not None, **tile,
            )
            accumulate(grad_u[rows], weight, w[columns])
            accumulate(grad_w[columns], weight.T, u[rows])
            if grad_bias is not None:
                grad_bias[columns] += weight.sum(0, dtype=torch.float32)
    return grad_u, grad_w, grad_bias
