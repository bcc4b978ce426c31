"""GPU kernels: all tiles in one batched product, one kernel per direction of the recursion, sums by segments.

Nothing synchronizes with the device and no shape depends on data, so the scan can be captured in a CUDA graph.
Positions that share a block or a word are sorted together and summed in a fixed order, so results are deterministic.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from hmmlm.ops.blocked_scan.kernels import (
    backward_kernel,
    factor_kernel,
    forward_kernel,
    pieces_kernel,
    segment_kernel,
    stray_kernel,
    tiles_kernel,
)
from hmmlm.ops.blocked_scan.problem import ENTRY, LIMITS, BlockedForward, BlockedProblem, Gradients
from hmmlm.ops.common import dot_precision

_TILE_BUDGET = 2**29  # elements of the transition tiles held at a time: 1 GB in bfloat16
_TILE_AT_ONCE = 16384  # elements of the largest tile that a step of the recursion loads at once
_IN_CHUNKS = {"chunk": 16384, "warps": 8, "stages": 3}  # larger tiles: elements per chunk, and pipeline stages
_PIECE = 8  # positions of one segment that one program sums
_FACTOR_TILE = {"BLOCK_OWN": 64, "BLOCK_OTHER": 64, "BLOCK_H": 128, "num_warps": 4}


class _Segments(NamedTuple):
    """Positions [B·span] sorted by source, block and word, a row each; key g is order[offsets[g] : offsets[g + 1]]."""

    order: Tensor  # [3, B·span]
    offsets: Tensor  # [3, keys + 1]


_BY_SOURCE, _BY_BLOCK, _BY_WORD = range(3)


def _segments(problem: BlockedProblem, first: int, end: int) -> _Segments:
    """Sort positions by source, block and word; negative keys (positions without one) precede all segments."""
    keys = torch.stack([x[:, first:end].flatten() for x in (problem.source, problem.block, problem.word)])
    keys, order = keys.int().sort(dim=1, stable=True)
    most = max(problem.u.shape[0], problem.log_emission.shape[0])
    edges = torch.arange(most + 1, dtype=torch.int32, device=keys.device).expand(len(keys), -1).contiguous()
    return _Segments(order, torch.searchsorted(keys, edges))


def _tiles(problem: BlockedProblem, first: int, end: int) -> Tensor:
    """Compute the tiles [B·span, k, k] in the dtype of products; positions that are not steps are not written."""
    batch, time = problem.word.shape
    _, kept, h = problem.u.shape
    out = problem.u.new_empty(batch * (end - first), kept, kept)
    size = _product(problem.u.dtype)
    grid = (out.shape[0], triton.cdiv(kept, size), triton.cdiv(kept, size))
    tiles_kernel[grid](
        problem.u,
        problem.w,
        problem.log_normalizer,
        problem.source,
        problem.block,
        out,
        first,
        end - first,
        time,
        KEPT=kept,
        H=h,
        PRECISION=dot_precision(problem.u.dtype),
        BLOCK_ROWS=size,
        BLOCK_COLUMNS=size,
        BLOCK_H=64,
        num_warps=4,
    )
    return out


def _product(dtype: torch.dtype) -> int:
    return 64 if dtype == torch.float32 else 128


def _recursion(problem: BlockedProblem) -> dict[str, int]:
    """Return the options of the recursion kernels: a tile at once if it fits, else in chunks of rows."""
    kept = problem.w.shape[1]
    width = triton.next_power_of_2(kept)
    if width**2 <= _TILE_AT_ONCE:
        return {"KEPT": kept, "WIDTH": width, "CHUNK": width, "STAGES": 1, "num_warps": 4}
    chunk = min(width, max(1, _IN_CHUNKS["chunk"] // width))
    stages, warps = _IN_CHUNKS["stages"], _IN_CHUNKS["warps"]
    return {"KEPT": kept, "WIDTH": width, "CHUNK": chunk, "STAGES": stages, "num_warps": warps}


def forward(problem: BlockedProblem) -> BlockedForward:
    """Compute filtered distributions and log-likelihoods; see `Limits` for what is suspect."""
    (batch, time), kept = problem.word.shape, problem.w.shape[1]
    filtered = problem.initial.new_zeros(batch, time + 1, kept)
    filtered[:, 0] = problem.initial
    predicted = problem.initial.new_empty(batch, time, kept)
    log_likelihood = problem.initial.new_empty(batch)
    suspect = torch.empty(batch, dtype=torch.int8, device=filtered.device)
    stray = problem.initial.new_zeros(batch, 2, kept)
    texts = (problem.word, problem.block, problem.source, problem.lengths)
    given = (*texts, problem.log_start, problem.log_emission, problem.entry)
    for first, end in problem.spans(_TILE_BUDGET):
        tiles, place, options = _tiles(problem, first, end), (first, end, time), _recursion(problem)
        found = (filtered, predicted, log_likelihood, suspect)
        forward_kernel[(batch,)](tiles, *given, *found, *place, LIMITS.floor, LIMITS.least_mass, **options)
        limits = (LIMITS.floor, LIMITS.lost, LIMITS.tiny, LIMITS.sure, LIMITS.tolerated)
        stray_kernel[(batch,)](tiles, *given, predicted, stray, suspect, *place, *limits, **options)
    return BlockedForward(log_likelihood, filtered, predicted, suspect.view(torch.bool))


def backward(problem: BlockedProblem, result: BlockedForward, grad: Tensor, extra: Tensor | None = None) -> Gradients:
    """Compute expected counts weighted by `grad` [B]; suspect sequences contribute nothing.

    Args:
        extra: [B, T + 1, k] added to the posterior of each position (entry t + 1 is that of t) from elsewhere.
    """
    (batch, time), kept = problem.word.shape, problem.w.shape[1]
    grad = grad.masked_fill(result.suspect, 0.0).float()
    out = Gradients(*(torch.empty_like(x, dtype=torch.float32) for x in problem.differentiable()))
    posterior, ratio = torch.empty_like(result.filtered), torch.empty_like(result.predicted)
    for first, end in reversed(problem.spans(_TILE_BUDGET)):
        tiles = _tiles(problem, first, end)
        backward_kernel[(batch,)](
            tiles,
            problem.source,
            problem.lengths,
            grad,
            result.filtered,
            result.predicted,
            posterior,
            ratio,
            result.filtered if extra is None else extra,
            out.initial,
            first,
            end,
            time,
            EXTRA=extra is not None,
            **_recursion(problem),
        )
        counts = posterior if extra is None else posterior + extra
        if first == 0:
            out.entry.copy_(torch.where(problem.source[:, :1] == ENTRY, counts[:, 1], 0.0))
        segments = _segments(problem, first, end)
        place = {"first": first, "span": end - first, "TIME": time, "ADD": end < time}
        before = (result.filtered, (time + 1) * kept)  # vectors over the rows of a tile, and their batch stride
        after = (ratio, time * kept)  # vectors over its columns, likewise
        _factor(segments, _BY_SOURCE, tiles, before, after, problem.block, problem.w, out.u, (kept, 1), place)
        _factor(segments, _BY_BLOCK, tiles, after, before, problem.source, problem.u, out.w, (1, kept), place)
        for by, values, target, sign, slot in (
            (_BY_SOURCE, posterior, out.log_normalizer, -1.0, 0),
            (_BY_BLOCK, counts, out.log_start, 1.0, 1),
            (_BY_WORD, counts, out.log_emission, 1.0, 1),
        ):
            width = triton.next_power_of_2(target.shape[1])
            segment_kernel[(target.shape[0],)](
                segments.order[by],
                segments.offsets[by],
                problem.source,
                values,
                target,
                sign=sign,
                SLOT=slot,
                STARTS=target is out.log_start,
                KEPT=target.shape[1],
                WIDTH=width,
                CHUNK=max(1, min(16, 2048 // width)),
                num_warps=1 if width <= 128 else 4,
                **place,
            )
    return out


def _factor(
    segments: _Segments,
    by: int,
    tiles: Tensor,
    own_vectors: tuple[Tensor, int],
    other_vectors: tuple[Tensor, int],
    other_group: Tensor,
    other_factor: Tensor,
    out: Tensor,
    strides: tuple[int, int],
    place: dict[str, int],
) -> None:
    """Compute the gradient of a factor: sum each piece of a segment, then the pieces of segments with several.

    Args:
        own_vectors: with their batch stride, as `other_vectors`.
    """
    groups, own, h = out.shape
    pieces = out.new_empty(groups + tiles.shape[0] // _PIECE, own, h)
    lookup = {"PIECE": _PIECE, "GROUPS": groups, "GROUPS_WIDTH": triton.next_power_of_2(groups)}
    grid = (
        len(pieces),
        triton.cdiv(own, _FACTOR_TILE["BLOCK_OWN"]),
        triton.cdiv(h, _FACTOR_TILE["BLOCK_H"]),
    )
    factor_kernel[grid](
        segments.order[by],
        segments.offsets[by],
        tiles,
        *own_vectors,
        *other_vectors,
        other_group,
        other_factor,
        out,
        pieces,
        own_stride=strides[0],
        other_stride=strides[1],
        OWN=own,
        OTHER=other_factor.shape[1],
        H=h,
        PRECISION=dot_precision(tiles.dtype),
        **place,
        **lookup,
        **_FACTOR_TILE,
    )
    pieces_kernel[(groups, triton.cdiv(own * h, 4096))](
        segments.offsets[by], pieces, out, SIZE=own * h, BLOCK=4096, ADD=place["ADD"], num_warps=8, **lookup
    )
