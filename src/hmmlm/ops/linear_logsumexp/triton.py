"""GPU kernels: scores exist only as tiles on the chip, in the forward pass and in both halves of the backward pass.

The backward pass computes every tile of scores twice, once for u and once for w. Writing slices of the softmax and
leaving two products to cuBLAS does less arithmetic, and was slower (0.86 ms against 0.78 ms at 16,384², h = 256).
"""
# mypy: allow-untyped-defs
# (arguments of kernels are pointers and numbers of Triton's own)

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmmlm.ops.linear_logsumexp import torch as portable

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_WHOLE_ROW = 512  # bytes: a block of longer rows does not fit on the chip beside its gradient


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
            scores = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
            for left in range(0, H, BLOCK_H):
                piece = left + tl.arange(0, BLOCK_H)
                in_rows = (rows < n_rows)[:, None] & (piece < H)[None, :]
                in_columns = (columns < n_columns)[None, :] & (piece < H)[:, None]
                p = tl.load(u + rows[:, None].to(tl.int64) * H + piece[None, :], mask=in_rows, other=0.0)
                q = tl.load(w + columns[None, :].to(tl.int64) * H + piece[:, None], mask=in_columns, other=0.0)
                scores = tl.dot(p, q, scores, input_precision=PRECISION)
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
def _gradient_kernel(
    own, other, bias, out, grad, gradient, grad_bias, n_own, n_other,
    H: tl.constexpr, OWN_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_OWN: tl.constexpr, BLOCK_OTHER: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """gradient[i] = Σ_j weight_ij other_j, weight being the softmax times the gradient of its row.

    Serves u (OWN_ROWS: i is a row of scores, j a column) and w (the other way round). A program a block of i.
    """
    i = tl.program_id(0) * BLOCK_OWN + tl.arange(0, BLOCK_OWN)
    inner = tl.arange(0, BLOCK_H)
    own_at = own + i[:, None].to(tl.int64) * H + inner[None, :]
    a = tl.load(own_at, mask=(i < n_own)[:, None] & (inner < H)[None, :], other=0.0)
    total = tl.zeros([BLOCK_OWN, BLOCK_H], tl.float32)
    columns_total = tl.zeros([BLOCK_OWN], tl.float32)
    if OWN_ROWS:
        own_shift = tl.load(out + i, mask=i < n_own, other=0.0)
        own_shift = tl.where(own_shift == -float("inf"), 0.0, own_shift * _LOG2E)
        own_scale = tl.load(grad + i, mask=i < n_own, other=0.0)
    for first in range(0, n_other, BLOCK_OTHER):
        j = first + tl.arange(0, BLOCK_OTHER)
        other_at = other + j[:, None].to(tl.int64) * H + inner[None, :]
        if EVEN:
            b = tl.load(other_at)
        else:
            b = tl.load(other_at, mask=(j < n_other)[:, None] & (inner < H)[None, :], other=0.0)
        scores = tl.dot(a, tl.trans(b), input_precision=PRECISION)
        if OWN_ROWS:
            if HAS_BIAS:
                scores += tl.load(bias + j, mask=j < n_other, other=0.0)[None, :]
            weight = tl.exp2(scores * _LOG2E - own_shift[:, None]) * own_scale[:, None]
        else:
            if HAS_BIAS:
                scores += tl.load(bias + i, mask=i < n_own, other=0.0)[:, None]
            shift = tl.load(out + j, mask=j < n_other, other=0.0)
            shift = tl.where(shift == -float("inf"), 0.0, shift * _LOG2E)
            scale = tl.load(grad + j, mask=j < n_other, other=0.0)
            weight = tl.exp2(scores * _LOG2E - shift[None, :]) * scale[None, :]
            if HAS_BIAS:
                columns_total += tl.sum(weight, 1)
        total = tl.dot(weight.to(b.dtype), b, total, input_precision=PRECISION)
    at = gradient + i[:, None].to(tl.int64) * H + inner[None, :]
    tl.store(at, total, mask=(i < n_own)[:, None] & (inner < H)[None, :])
    if HAS_BIAS and not OWN_ROWS:
        tl.store(grad_bias + i, columns_total, mask=i < n_own)


def _tile(dtype: torch.dtype, h: int, kernel: str) -> dict[str, int | str]:
    """Tile sizes, measured on an H200 for bfloat16 and h = 256; products of float32 are exact to its last bits."""
    whole = max(16, triton.next_power_of_2(h))
    if dtype == torch.float32:
        shared: dict[str, int | str] = {"PRECISION": "tf32x3", "num_warps": 4, "num_stages": 2}
        if kernel == "forward":
            return {"BLOCK_ROWS": 64, "BLOCK_COLUMNS": 64, "BLOCK_H": min(64, whole), **shared}
        return {"BLOCK_OWN": 64, "BLOCK_OTHER": 32, "BLOCK_H": whole, **shared}
    shared = {"PRECISION": "ieee", "num_warps": 8}
    if kernel == "forward":
        block_h = whole if whole <= 256 else 64
        return {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128, "BLOCK_H": block_h, "num_stages": 2, **shared}
    return {"BLOCK_OWN": 128, "BLOCK_OTHER": 64, "BLOCK_H": whole, "num_stages": 3, **shared}


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
    if h * u.element_size() > _WHOLE_ROW or not n:
        return portable.backward(grad, u, w, bias, out)
    tile = _tile(u.dtype, h, "gradient")
    block_own, block_other = int(tile["BLOCK_OWN"]), int(tile["BLOCK_OTHER"])
    grad_u, grad_w = torch.empty_like(u, dtype=torch.float32), torch.empty_like(w, dtype=torch.float32)
    grad_bias = None if bias is None else torch.empty_like(bias)
    for own, other, gradient in ((u, w, grad_u), (w, u, grad_w)):
        _gradient_kernel[(triton.cdiv(own.shape[0], block_own),)](
            own, other, bias, out, grad, gradient, grad_bias, own.shape[0], other.shape[0], H=h, OWN_ROWS=own is u,
            HAS_BIAS=bias is not None, EVEN=other.shape[0] % block_other == 0 and h == tile["BLOCK_H"], **tile,
        )  # fmt: skip
    return grad_u, grad_w, grad_bias
