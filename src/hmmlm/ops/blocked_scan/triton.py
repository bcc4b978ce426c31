"""GPU kernels: all tiles in one batched product, each direction of the recursion as one kernel, sums by segments.

Nothing waits for the device and no shape depends on data, so all of it can be captured in a CUDA graph. Positions that
share a block or a word are sorted together and added up by one program, so results do not depend on timing.
"""
# mypy: allow-untyped-defs
# (arguments of kernels are pointers and numbers of Triton's own)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmmlm.ops.blocked_scan.problem import NOTHING, START, Gradients, Problem, State, floors

_TILE_BUDGET = 2**29  # numbers in the transition tiles held at a time: 1 GB in bfloat16
_RECURSION_CHUNK = 8192  # numbers of a tile that a step of the recursion reads at a time
_RECURSION_WARPS = 8
_FACTOR_TILE = {"BLOCK_OWN": 64, "BLOCK_OTHER": 64, "BLOCK_H": 128, "num_warps": 4}
_START = tl.constexpr(START)


@triton.jit
def _tiles_kernel(
    u, w, log_normalizer, source, block, tiles, first, span, TIME,
    ROWS: tl.constexpr, KEPT: tl.constexpr, H: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """tiles[n, i, j] = A[state i of the source, state j of the block] for position n of [B, span]."""
    n = tl.program_id(0).to(tl.int64)
    at = (n // span) * TIME + first + n % span
    group = tl.load(source + at)
    if group >= 0:
        row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column = tl.program_id(2) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        own = tl.load(block + at)
        scores = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for start in range(0, H, BLOCK_H):
            inner = start + tl.arange(0, BLOCK_H)
            a = tl.load(
                u + (group * ROWS + row)[:, None] * H + inner[None, :],
                mask=(row < ROWS)[:, None] & (inner < H)[None, :], other=0.0,
            )
            b = tl.load(
                w + (own * KEPT + column)[None, :] * H + inner[:, None],
                mask=(column < KEPT)[None, :] & (inner < H)[:, None], other=0.0,
            )
            scores = tl.dot(a, b, scores, input_precision=PRECISION)
        shift = tl.load(log_normalizer + group * ROWS + row, mask=row < ROWS, other=0.0)
        values = tl.exp(scores - shift[:, None])
        tl.store(
            tiles + n * ROWS * KEPT + row[:, None] * KEPT + column[None, :], values.to(tiles.dtype.element_ty),
            mask=(row < ROWS)[:, None] & (column < KEPT)[None, :],
        )


@triton.jit
def _forward_kernel(
    tiles, word, block, source, lengths, log_start, log_emission, filtered, predicted, log_likelihood, alive,
    first, end, TIME, FLOOR, SUSPICIOUS,
    ROWS: tl.constexpr, KEPT: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program a sequence. The filtered distribution of a step passes to the next through memory."""
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < KEPT
    total = tl.load(log_likelihood + b)
    living = tl.load(alive + b)
    for t in range(first, tl.minimum(end, tl.load(lengths + b).to(tl.int32))):
        at = b * TIME + t
        emission = tl.load(log_emission + tl.load(word + at) * KEPT + column, mask=inside, other=-float("inf"))
        if tl.load(source + at) == _START:
            start = tl.load(log_start + tl.load(block + at) * KEPT + column, mask=inside, other=-float("inf"))
            scores = emission + start
            reached = tl.full([WIDTH], 1.0, tl.float32)
        else:
            scores = emission
            tile = tiles + (b * (end - first) + t - first) * ROWS * KEPT
            sums = tl.zeros([CHUNK, WIDTH], tl.float32)
            for top in range(0, ROWS, CHUNK):
                row = top + tl.arange(0, CHUNK)
                f = tl.load(filtered + (b * (TIME + 1) + t) * ROWS + row, mask=row < ROWS, other=0.0)
                mask = (row < ROWS)[:, None] & inside[None, :]
                a = tl.load(tile + row[:, None] * KEPT + column[None, :], mask=mask, other=0.0)
                sums += f[:, None] * a.to(tl.float32)
            reached = tl.sum(sums, 0)
            reached = tl.where(reached < FLOOR, 0.0, reached)
            tl.store(predicted + at * KEPT + column, reached, mask=inside)
        shift = tl.max(scores, 0)
        shift = tl.where(shift == -float("inf"), 0.0, shift)
        weight = tl.exp(scores - shift) * reached
        mass = tl.sum(weight, 0)
        living = tl.where(mass >= SUSPICIOUS, living, 0)
        mass = tl.where(living > 0, mass, 1.0)
        total += tl.log(mass) + shift
        f = tl.where(living > 0, weight / mass, 0.0)
        tl.store(filtered + (b * (TIME + 1) + t + 1) * ROWS + column, f, mask=inside)
        tl.debug_barrier()  # the next step reads all of it
    tl.store(log_likelihood + b, total)
    tl.store(alive + b, living)


@triton.jit
def _backward_kernel(
    tiles, source, lengths, grad, filtered, predicted, posterior, ratio, first, end, TIME,
    ROWS: tl.constexpr, KEPT: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program a sequence: posterior[b, t + 1] of position t times grad, and ratio[b, t] = posterior / predicted."""
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < KEPT
    weight = tl.load(grad + b)
    length = tl.load(lengths + b).to(tl.int32)
    last = tl.minimum(end, length) - 1
    for step in range(last - first + 1):
        t = last - step
        at = b * TIME + t
        slot = (b * (TIME + 1) + t + 1) * ROWS
        following = tl.load(source + at + 1, mask=t + 1 < length, other=_START)
        if following < 0:  # nothing later bears on this position
            gamma = weight * tl.load(filtered + slot + column, mask=inside, other=0.0)
            tl.store(posterior + slot + column, gamma, mask=inside)
        else:
            gamma = tl.load(posterior + slot + column, mask=inside, other=0.0)
        if tl.load(source + at) >= 0:
            q = tl.load(predicted + at * KEPT + column, mask=inside, other=0.0)
            r = tl.where(q > 0, gamma / tl.where(q > 0, q, 1.0), 0.0)
            tl.store(ratio + at * KEPT + column, r, mask=inside)
            tile = tiles + (b * (end - first) + t - first) * ROWS * KEPT
            for top in range(0, ROWS, CHUNK):
                row = top + tl.arange(0, CHUNK)
                mask = (row < ROWS)[:, None] & inside[None, :]
                a = tl.load(tile + row[:, None] * KEPT + column[None, :], mask=mask, other=0.0)
                ahead = tl.sum(a.to(tl.float32) * r[None, :], 1)
                f = tl.load(filtered + slot - ROWS + row, mask=row < ROWS, other=0.0)
                tl.store(posterior + slot - ROWS + row, f * ahead, mask=row < ROWS)
        tl.debug_barrier()  # the next step reads all of it


@triton.jit
def _factor_kernel(
    order, offsets, tiles, own_vector, own_batch, other_vector, other_batch, other_group, other_factor, out,
    first, span, TIME, own_stride, other_stride,
    OWN: tl.constexpr, OTHER: tl.constexpr, H: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_OWN: tl.constexpr, BLOCK_OTHER: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[g, i] += Σ over positions n of segment g and j of posterior pairs ξ_n(i, j) · factor[group of n, j].

    ξ_n(i, j) = own_i · tile_n(i, j) · other_j. Serves U (own: rows of the tile) and W (own: its columns).
    """
    g = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * BLOCK_OWN + tl.arange(0, BLOCK_OWN)
    inner = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_OWN, BLOCK_H], tl.float32)
    for k in range(tl.load(offsets + g), tl.load(offsets + g + 1)):
        n = tl.load(order + k)
        b, t = n // span, first + n % span
        group = tl.load(other_group + b * TIME + t)
        x = tl.load(own_vector + b * own_batch + t * OWN + own, mask=own < OWN, other=0.0)
        for start in range(0, OTHER, BLOCK_OTHER):
            other = start + tl.arange(0, BLOCK_OTHER)
            y = tl.load(other_vector + b * other_batch + t * OTHER + other, mask=other < OTHER, other=0.0)
            a = tl.load(
                tiles + n * OWN * OTHER + own[:, None] * own_stride + other[None, :] * other_stride,
                mask=(own < OWN)[:, None] & (other < OTHER)[None, :], other=0.0,
            )
            factor = tl.load(
                other_factor + (group * OTHER + other)[:, None] * H + inner[None, :],
                mask=(other < OTHER)[:, None] & (inner < H)[None, :], other=0.0,
            )
            pairs = (x[:, None] * a.to(tl.float32) * y[None, :]).to(factor.dtype)
            total = tl.dot(pairs, factor, total, input_precision=PRECISION)
    to = out + (g * OWN + own)[:, None] * H + inner[None, :]
    mask = (own < OWN)[:, None] & (inner < H)[None, :]
    tl.store(to, total + tl.load(to, mask=mask, other=0.0), mask=mask)


@triton.jit
def _segment_kernel(
    order, offsets, values, out, first, span, TIME, sign,
    SLOT: tl.constexpr, ROWS: tl.constexpr, KEPT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out[g] += sign · Σ over positions (b, t) of segment g of values[b, t + SLOT]."""
    g = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    total = tl.load(out + g * KEPT + column, mask=column < KEPT, other=0.0)
    for k in range(tl.load(offsets + g), tl.load(offsets + g + 1)):
        n = tl.load(order + k)
        slot = (n // span) * (TIME + 1) + first + n % span + SLOT
        total += sign * tl.load(values + slot * ROWS + column, mask=column < KEPT, other=0.0)
    tl.store(out + g * KEPT + column, total, mask=column < KEPT)


class _Segments(NamedTuple):
    """Positions [B·span] sorted by key; those with key g are order[offsets[g] : offsets[g + 1]]. One row a key."""

    order: Tensor  # [4, B·span]
    offsets: Tensor  # [4, keys + 1]


_BY_SOURCE, _BY_BLOCK, _BY_START, _BY_WORD = range(4)


def _segments(problem: Problem, first: int, end: int) -> _Segments:
    """Steps by source, steps by block, starts by block, all positions by word."""
    source, block = problem.source[:, first:end].flatten(), problem.block[:, first:end].flatten()
    word = problem.word[:, first:end].flatten()
    nowhere = max(problem.u.shape[0], problem.log_emission.shape[0])
    keys = torch.stack([
        torch.where(source >= 0, source, nowhere), torch.where(source >= 0, block, nowhere),
        torch.where(source == START, block, nowhere), torch.where(source != NOTHING, word, nowhere),
    ])  # fmt: skip
    keys, order = keys.sort(dim=1, stable=True)
    edges = torch.arange(nowhere + 1, device=keys.device).expand(len(keys), -1).contiguous()
    return _Segments(order, torch.searchsorted(keys, edges))


def _tiles(problem: Problem, first: int, end: int) -> Tensor:
    """[B·span, R, kept] in the dtype of products; unwritten where no step is."""
    batch, time = problem.word.shape
    (_, rows, h), kept = problem.u.shape, problem.w.shape[1]
    out = problem.u.new_empty(batch * (end - first), rows, kept)
    size = _product(problem.u.dtype)
    grid = (out.shape[0], triton.cdiv(rows, size), triton.cdiv(kept, size))
    _tiles_kernel[grid](
        problem.u, problem.w, problem.log_normalizer, problem.source, problem.block, out, first, end - first, time,
        ROWS=rows, KEPT=kept, H=h, PRECISION=_precision(problem.u.dtype),
        BLOCK_ROWS=size, BLOCK_COLUMNS=size, BLOCK_H=64, num_warps=4,
    )  # fmt: skip
    return out


def _product(dtype: torch.dtype) -> int:
    return 64 if dtype == torch.float32 else 128


def _precision(dtype: torch.dtype) -> str:
    """Products of float32 are exact to its last bits."""
    return "tf32x3" if dtype == torch.float32 else "ieee"


def _recursion(problem: Problem) -> dict[str, int]:
    rows, kept = problem.u.shape[1], problem.w.shape[1]
    width = triton.next_power_of_2(kept)
    chunk = min(triton.next_power_of_2(rows), max(1, _RECURSION_CHUNK // width))
    return {"ROWS": rows, "KEPT": kept, "WIDTH": width, "CHUNK": chunk, "num_warps": _RECURSION_WARPS}


def forward(problem: Problem) -> State:
    """Filtered distributions and log-likelihoods."""
    batch, time = problem.word.shape
    rows, kept = problem.u.shape[1], problem.w.shape[1]
    filtered = problem.initial.new_zeros(batch, time + 1, rows)
    filtered[:, 0] = problem.initial
    predicted = problem.initial.new_empty(batch, time, kept)
    log_likelihood = problem.initial.new_zeros(batch)
    alive = torch.ones(batch, dtype=torch.int32, device=filtered.device)
    for first, end in problem.spans(_TILE_BUDGET):
        _forward_kernel[(batch,)](
            _tiles(problem, first, end), problem.word, problem.block, problem.source, problem.lengths,
            problem.log_start, problem.log_emission, filtered, predicted, log_likelihood, alive,
            first, end, time, *floors(torch.float32), **_recursion(problem),
        )  # fmt: skip
    suspect = alive == 0
    return State(log_likelihood.masked_fill_(suspect, -torch.inf), filtered, predicted, suspect)


def backward(problem: Problem, state: State, grad: Tensor) -> Gradients:
    """Expected counts, weighted by `grad` [B]; nothing from suspect sequences."""
    batch, time = problem.word.shape
    (groups, rows, h), (blocks, kept, _) = problem.u.shape, problem.w.shape
    grad = grad.masked_fill(state.suspect, 0.0).float()
    out = Gradients(*(torch.zeros_like(x, dtype=torch.float32) for x in (
        problem.u, problem.w, problem.log_normalizer, problem.log_start, problem.log_emission, problem.initial)))
    posterior, ratio = torch.zeros_like(state.filtered), torch.zeros_like(state.predicted)
    for first, end in reversed(problem.spans(_TILE_BUDGET)):
        tiles = _tiles(problem, first, end)
        _backward_kernel[(batch,)](
            tiles, problem.source, problem.lengths, grad, state.filtered, state.predicted, posterior, ratio,
            first, end, time, **_recursion(problem),
        )  # fmt: skip
        order, offsets = _segments(problem, first, end)
        place = {"first": first, "span": end - first, "TIME": time}
        before = (state.filtered, (time + 1) * rows)  # of the step's source
        after = (ratio, time * kept)  # of its block
        factor = {"H": h, "PRECISION": _precision(problem.u.dtype), **_FACTOR_TILE}
        own, inner = _FACTOR_TILE["BLOCK_OWN"], _FACTOR_TILE["BLOCK_H"]
        _factor_kernel[(groups, triton.cdiv(rows, own), triton.cdiv(h, inner))](
            order[_BY_SOURCE], offsets[_BY_SOURCE], tiles, *before, *after, problem.block, problem.w, out.u,
            own_stride=kept, other_stride=1, OWN=rows, OTHER=kept, **place, **factor,
        )  # fmt: skip
        _factor_kernel[(blocks, triton.cdiv(kept, own), triton.cdiv(h, inner))](
            order[_BY_BLOCK], offsets[_BY_BLOCK], tiles, *after, *before, problem.source, problem.u, out.w,
            own_stride=1, other_stride=kept, OWN=kept, OTHER=rows, **place, **factor,
        )  # fmt: skip
        for by, target, sign, slot in (
            (_BY_SOURCE, out.log_normalizer, -1.0, 0), (_BY_START, out.log_start, 1.0, 1),
            (_BY_WORD, out.log_emission, 1.0, 1),
        ):  # fmt: skip
            _segment_kernel[(target.shape[0],)](
                order[by], offsets[by], posterior, target, sign=sign, SLOT=slot, ROWS=rows, KEPT=target.shape[1],
                WIDTH=triton.next_power_of_2(target.shape[1]), num_warps=1, **place,
            )
        if first == 0:
            ahead = torch.bmm(tiles.view(batch, end, rows, kept)[:, 0].float(), ratio[:, 0, :, None])
            out.initial.copy_(ahead[:, :, 0])
    return out
