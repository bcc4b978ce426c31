"""The scan of a blocked HMM with A = softmax(u wᵀ) from a table of all transition probabilities.

The table has as many elements as the normalizers sum over anyway: computing it takes one product, and its gradient
two. Normalizers apart from the scan take four products, and the tiles of the scan more.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.ops.blocked_scan import scaled
from hmmlm.ops.blocked_scan.api import log_carry
from hmmlm.ops.blocked_scan.problem import BlockedForward, Problem, tile_lines
from hmmlm.ops.common import FLOOR, NEG_INF

_LARGEST = 2**26  # elements of a table: 256 MB in float32
_CHUNK = 2**21  # elements of the rows that are processed together: they stay in the cache


def fits(states: int, reference: Tensor) -> bool:
    """Return whether the transitions between all states are to be kept in a table."""
    return reference.device.type == "cpu" and reference.dtype in FLOOR and states**2 <= _LARGEST


def table_scan(problem: Problem, u: Tensor, w: Tensor, *given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-likelihoods [B], the carry [B, k] and suspect sequences [B].

    Args:
        problem: without factors and table.
        u: [Z, h] factors of the states that are left.
        w: [Z, h] factors of the states that are entered.
        given: log_start [Z], log_emission [V, k] and the entry [B, 1, k], if there is one.
    """
    result: tuple[Tensor, Tensor, Tensor] = _TableScan.apply(problem, u, w, *given)
    return result


class _TableScan(torch.autograd.Function):
    """Autograd function of `table_scan`: the gradient of the scores is that of a softmax, from expected counts."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, u: Tensor, w: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
        blocks, kept = problem.w.shape[:2]
        problem = problem._replace(table=_transitions(u, w).view(blocks, kept, blocks, kept))
        result = scaled.forward(problem)
        ctx.shapes = [None if x is None else x.shape for x in given]
        ctx.save_for_backward(u, w, *problem, *result)
        carry = log_carry(problem, result)[0].masked_fill_(result.suspect[:, None], NEG_INF)
        ctx.mark_non_differentiable(carry, result.suspect)
        return result.log_likelihood.masked_fill(result.suspect, NEG_INF), carry, result.suspect

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        u, w, *saved = ctx.saved_tensors
        size = len(Problem._fields)
        problem, result = Problem(*saved[:size]), BlockedForward(*saved[size:])
        blocks, kept = problem.w.shape[:2]
        pair = problem.source.clamp_min(0) * blocks + problem.block.clamp_min(0)
        distinct, index = pair.unique(return_inverse=True)
        counts = torch.zeros(len(distinct), kept, kept, dtype=u.dtype)

        def add(tiles: scaled.Tiles, pairs: Tensor) -> None:
            if tiles.tile_of is None:
                counts.index_add_(0, index[:, tiles.first : tiles.end].flatten(), pairs)
            else:  # one tile for each of `distinct`
                counts.add_(pairs)

        out = scaled.backward(problem, result, grads[0], add_pairs=add)
        grad_u, grad_w = _gradients(problem, distinct, counts, out.log_normalizer, u, w)
        given = (out.log_start, out.log_emission, out.entry)
        shaped = (None if s is None else g.reshape(s) for g, s in zip(given, ctx.shapes, strict=True))
        return None, grad_u, grad_w, *shaped


def _chunks(count: int, elements: int) -> Iterator[slice]:
    """Yield slices of `count` rows or blocks, each with about `_CHUNK` elements; a row or block has `elements`."""
    size = max(1, _CHUNK // elements)
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def _transitions(u: Tensor, w: Tensor) -> Tensor:
    """Compute softmax(u wᵀ) [n, Z]; results below FLOOR are zero, because denormal numbers are slow on CPUs."""
    table = u.new_empty(u.shape[0], w.shape[0])
    for rows in _chunks(u.shape[0], w.shape[0]):
        torch.softmax(u[rows] @ w.T, 1, out=table[rows])
        torch.threshold_(table[rows], FLOOR[u.dtype], 0.0)
    return table


def _gradients(
    problem: Problem, distinct: Tensor, counts: Tensor, grad_normalizer: Tensor, u: Tensor, w: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of u and w [Z, h].

    Args:
        distinct: [D] source block · M + target block of the tiles that were used.
        counts: [D, k, k] expected transitions of these tiles.
        grad_normalizer: [M, k] minus the expected transitions out of each state.
    """
    assert problem.table is not None
    blocks, kept = problem.table.shape[:2]
    grad_u, grad_w = torch.empty_like(u), torch.zeros_like(w)
    for chunk in _chunks(blocks, kept * len(w)):
        scores = problem.table[chunk] * grad_normalizer[chunk, :, None, None]
        first, end = torch.searchsorted(distinct, torch.tensor([chunk.start, chunk.stop]) * blocks).tolist()
        source, target = distinct[first:end] // blocks - chunk.start, distinct[first:end] % blocks
        lines = tile_lines(source, target, kept, blocks)
        scores.view(-1, kept).index_add_(0, lines, counts[first:end].flatten(0, 1))
        scores, own = scores.view(-1, len(w)), slice(chunk.start * kept, chunk.stop * kept)
        grad_u[own] = scores @ w
        grad_w.addmm_(scores.T, u[own])
    return grad_u, grad_w
