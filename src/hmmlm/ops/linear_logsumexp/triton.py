"""GPU kernels: scores exist only as tiles on the chip, in the forward pass and in both halves of the backward pass.

The backward pass computes every tile of scores twice, once for u and once for w. Writing slices of the softmax and
leaving two products to cuBLAS does less arithmetic but was slower (0.86 ms against 0.78 ms at 16,384², h = 256).

A program holds a block of rows (of columns, for the gradient of w) and iterates over the tiles of the other side.
Blocks of the last (or only) round that would leave most processors idle are split: several programs share the tiles of
such a block. Their results are merged in a fixed order, so results are deterministic.
"""
# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers)

from functools import cache
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmmlm.ops.common import dot_precision
from hmmlm.ops.linear_logsumexp import chunked

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_WHOLE_ROW = 512  # bytes: a block of longer rows does not fit on the chip together with its gradient
_START = 4  # estimated overhead of a program, in tiles
_MERGE = 4  # estimated cost of merging splits, in tiles
_MAX_ROUNDS = 4  # of split programs: bounds the memory of their partial results for any size


@triton.jit
def _share(n_whole, splits, span, n_other):
    """Return this program's block, its split (0 if the block is whole), and its range of the other side."""
    program = tl.program_id(0)
    late = tl.maximum(program - n_whole, 0)
    split = late % splits
    begin = split * span
    end = tl.where(program < n_whole, n_other, tl.minimum(begin + span, n_other))
    return tl.minimum(program, n_whole) + late // splits, split, begin, end


@triton.jit
def _forward_kernel(
    u,
    w,
    bias,
    out,
    n_rows,
    n_columns,
    n_whole,
    splits,
    span,
    split_rows,
    H: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per block of rows or split of one (see `_Schedule`): running maximum and sum over column tiles."""
    block, split, begin, end = _share(n_whole, splits, span, n_columns)
    rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    largest = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    WHOLE: tl.constexpr = BLOCK_H >= H
    if WHOLE:  # the rows of u fit on the chip together with a tile: read them once
        inner = tl.arange(0, BLOCK_H)
        a = tl.load(
            u + rows[:, None].to(tl.int64) * H + inner[None, :],
            mask=(rows < n_rows)[:, None] & (inner < H)[None, :],
            other=0.0,
        )
    for first in range(begin, end, BLOCK_COLUMNS):
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
        # `largest` is rounded once, in units of log 2, and only ever compared with itself: were the factor of `total`
        # computed from the maximum of the scores, its rounding would multiply `total` again with every tile.
        new_largest = tl.maximum(largest, tl.max(scores, 1) * _LOG2E)
        shift = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        total = total * tl.exp2(largest - shift) + tl.sum(tl.exp2(scores * _LOG2E - shift[:, None]), 1)
        largest = new_largest
    result = tl.where(total > 0, (largest + tl.log2(total)) * _LN2, -float("inf"))
    tl.store(out + split * split_rows + rows, result, mask=rows < n_rows)


@triton.jit
def _merge_kernel(partial, n_rows, splits, BLOCK_SPLITS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """One program per block of rows: logsumexp over the splits of partial [splits, n_rows], stored in the first."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.arange(0, BLOCK_SPLITS)
    inside = (split < splits)[:, None] & (rows < n_rows)[None, :]
    values = tl.load(partial + split[:, None] * n_rows + rows[None, :], mask=inside, other=-float("inf"))
    largest = tl.max(values, 0)
    shift = tl.where(largest == -float("inf"), 0.0, largest * _LOG2E)
    total = tl.sum(tl.exp2(values * _LOG2E - shift[None, :]), 0)
    result = tl.where(total > 0, (shift + tl.log2(total)) * _LN2, -float("inf"))
    tl.store(partial + rows, result, mask=rows < n_rows)


@triton.jit
def _gradient_kernel(
    own,
    other,
    bias,
    out,
    grad,
    gradient,
    grad_bias,
    n_own,
    n_other,
    n_whole,
    splits,
    span,
    split_rows,
    H: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_OTHER: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per block of i or split of one (see `_Schedule`): gradient[i] = Σ_j weight_ij other_j.

    weight is the softmax times the gradient of its row. Serves u (OWN_ROWS: i is a row of scores, j a column) and w
    (i is a column, j a row).
    """
    block, split, begin, end = _share(n_whole, splits, span, n_other)
    i = block * BLOCK_OWN + tl.arange(0, BLOCK_OWN)
    inner = tl.arange(0, BLOCK_H)
    own_at = own + i[:, None].to(tl.int64) * H + inner[None, :]
    a = tl.load(own_at, mask=(i < n_own)[:, None] & (inner < H)[None, :], other=0.0)
    total = tl.zeros([BLOCK_OWN, BLOCK_H], tl.float32)
    columns_total = tl.zeros([BLOCK_OWN], tl.float32)
    if OWN_ROWS:
        own_shift = tl.load(out + i, mask=i < n_own, other=0.0)
        own_shift = tl.where(own_shift == -float("inf"), 0.0, own_shift * _LOG2E)
        own_scale = tl.load(grad + i, mask=i < n_own, other=0.0)
    for first in range(begin, end, BLOCK_OTHER):
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
    to = split * split_rows + i
    at = gradient + to[:, None].to(tl.int64) * H + inner[None, :]
    tl.store(at, total, mask=(i < n_own)[:, None] & (inner < H)[None, :])
    if HAS_BIAS and not OWN_ROWS:
        tl.store(grad_bias + to, columns_total, mask=i < n_own)


def _tile(dtype: torch.dtype, h: int, kernel: Literal["forward", "u", "w"]) -> dict[str, int | str]:
    """Return tile sizes (tuned on an H200 for bfloat16, h = 256) and precision, of `forward` or the gradient of u or w.

    Small blocks of u run in pairs on a processor: one multiplies while the other takes exponentials.
    """
    whole = max(16, triton.next_power_of_2(h))
    if dtype == torch.float32:
        shared: dict[str, int | str] = {"PRECISION": dot_precision(dtype), "num_warps": 4, "num_stages": 2}
        if kernel == "forward":
            return {"BLOCK_ROWS": 64, "BLOCK_COLUMNS": 64, "BLOCK_H": min(64, whole), **shared}
        return {"BLOCK_OWN": 64, "BLOCK_OTHER": 32, "BLOCK_H": whole, **shared}
    shared = {"PRECISION": dot_precision(dtype), "num_warps": 8}
    if kernel == "forward":
        if whole <= 256:
            return {"BLOCK_ROWS": 256, "BLOCK_COLUMNS": 64, "BLOCK_H": whole, "num_stages": 3, **shared}
        return {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128, "BLOCK_H": 64, "num_stages": 2, **shared}
    if kernel == "u":
        return {"BLOCK_OWN": 64, "BLOCK_OTHER": 64, "BLOCK_H": whole, **shared, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_OWN": 128, "BLOCK_OTHER": 64, "BLOCK_H": whole, "num_stages": 3, **shared}


class _Schedule(NamedTuple):
    """Assignment of blocks to programs; results are [rows of whole blocks, then `splits` × rows of split blocks]."""

    n_whole: int  # blocks with one program each
    splits: int  # programs for each of the remaining blocks
    span: int  # rows of the other side per split
    split_rows: int  # rows in split blocks


@cache
def _processors(device: torch.device) -> int:
    """Return the number of multiprocessors of the GPU; 132, an H200's, for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def _splits(blocks: int, tiles: int, processors: int) -> int:
    """Return how many programs should share each block, when the blocks are too few to fill the processors."""

    def cost(splits: int) -> int:
        rounds = triton.cdiv(blocks * splits, processors)
        return rounds * (triton.cdiv(tiles, splits) + _START) + (_MERGE if splits > 1 else 0)

    most = min(tiles, _MAX_ROUNDS * processors // max(1, blocks))
    return min(range(1, most + 1), key=cost)


def _schedule(n_own: int, n_other: int, block: int, across: int, device: torch.device) -> _Schedule:
    """Return the schedule for n_own rows in blocks of `block` and n_other rows in tiles of `across`."""
    blocks, tiles, processors = triton.cdiv(n_own, block), triton.cdiv(n_other, across), _processors(device)
    splits = _splits(blocks % processors, tiles, processors)
    n_whole = blocks if splits == 1 else blocks - blocks % processors
    return _Schedule(n_whole, splits, triton.cdiv(tiles, splits) * across, max(0, n_own - n_whole * block))


def forward(u: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the logsumexp [N] in float32."""
    n, h = u.shape
    if not n:
        return u.new_empty(0, dtype=torch.float32)
    tile = _tile(u.dtype, h, "forward")
    block, across = int(tile["BLOCK_ROWS"]), int(tile["BLOCK_COLUMNS"])
    schedule = _schedule(n, w.shape[0], block, across, u.device)
    n_whole, splits, _, split_rows = schedule
    even = w.shape[0] % across == 0 and h == triton.next_power_of_2(h) and h >= 16
    out = u.new_empty(n + (splits - 1) * split_rows, dtype=torch.float32)
    _forward_kernel[(n_whole + splits * triton.cdiv(split_rows, block),)](
        u, w, bias, out, n, w.shape[0], *schedule, H=h, HAS_BIAS=bias is not None, EVEN=even, **tile
    )
    if splits > 1:
        _merge_kernel[(triton.cdiv(split_rows, 32),)](
            out[n - split_rows :], split_rows, splits, BLOCK_SPLITS=triton.next_power_of_2(splits), BLOCK_ROWS=32
        )
    return out.resize_(n)  # not a slice: autograd would forbid in-place operations on it


def backward(
    grad: Tensor, u: Tensor, w: Tensor, bias: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute gradients of u, w and bias in float32."""
    n, h = u.shape
    if h * u.element_size() > _WHOLE_ROW or not n:
        return chunked.backward(grad, u, w, bias, out)

    def gradient(own: Tensor, other: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the gradient of `own` (u or w), and that of the bias if `own` is w."""
        n_own, n_other = own.shape[0], other.shape[0]
        tile = _tile(u.dtype, h, "u" if own is u else "w")
        block, across = int(tile["BLOCK_OWN"]), int(tile["BLOCK_OTHER"])
        schedule = _schedule(n_own, n_other, block, across, u.device)
        n_whole, splits, _, split_rows = schedule
        n_results = n_own + (splits - 1) * split_rows
        result = own.new_empty(n_results, h, dtype=torch.float32)
        grad_bias = None if bias is None or own is u else bias.new_empty(n_results)
        _gradient_kernel[(n_whole + splits * triton.cdiv(split_rows, block),)](
            own,
            other,
            bias,
            out,
            grad,
            result,
            grad_bias,
            n_own,
            n_other,
            *schedule,
            H=h,
            OWN_ROWS=own is u,
            HAS_BIAS=bias is not None,
            EVEN=n_other % across == 0 and h == tile["BLOCK_H"],
            **tile,
        )
        for partial in (result, grad_bias):
            if splits > 1 and partial is not None:
                partial[n_own - split_rows : n_own] += partial[n_own:].unflatten(0, (-1, split_rows)).sum(0)
        return result[:n_own], None if grad_bias is None else grad_bias[:n_own]

    return gradient(u, w)[0], *gradient(w, u)
