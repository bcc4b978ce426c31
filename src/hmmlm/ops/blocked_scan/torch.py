"""Portable: scaled probabilities, one batched product a step, tiles for a bounded range of time at once.

The backward pass never forms a backward probability, which can overflow. With f the filtered and q the predicted
distribution, the posterior of the pair (i, j) is f_i A_ij (γ_j / q_j), and f_i A_ij / q_j ≤ 1 is p(i | j, the past).
"""

import torch
from torch import Tensor

from hmmlm.ops.blocked_scan.problem import START, Gradients, Problem, State, floors
from hmmlm.ops.linear_logsumexp.precision import matmul

_TILE_BUDGET = 2**26  # numbers in the transition tiles held at a time: 256 MB in float32


def _gather(problem: Problem, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    """For times first to end: rows of U [B·span, R, h], rows of W [B·span, kept, h], tiles [B, span, R, kept].

    Positions that are no step get some tile, and nobody looks at it.
    """
    source, block = (x[:, first:end].clamp_min(0).reshape(-1) for x in (problem.source, problem.block))
    rows, columns = problem.u.index_select(0, source), problem.w.index_select(0, block)
    scores = matmul(rows, columns.transpose(1, 2))
    tiles = scores.sub_(problem.log_normalizer.index_select(0, source)[:, :, None]).exp_()
    return rows, columns, tiles.view(problem.word.shape[0], end - first, *tiles.shape[1:])


def forward(problem: Problem) -> State:
    """Filtered distributions and log-likelihoods."""
    batch, time = problem.word.shape
    dtype, kept = problem.log_start.dtype, problem.w.shape[1]
    floor, suspicious = floors(dtype)
    filtered = torch.zeros(batch, time + 1, problem.u.shape[1], dtype=dtype, device=problem.u.device)
    filtered[:, 0] = problem.initial
    predicted = torch.zeros(batch, time, kept, dtype=dtype, device=problem.u.device)
    log_likelihood = torch.zeros(batch, dtype=dtype, device=problem.u.device)
    alive = torch.ones(batch, dtype=torch.bool, device=problem.u.device)
    word, block = problem.word.clamp_min(0), problem.block.clamp_min(0)
    for first, end in problem.spans(_TILE_BUDGET):
        tiles = _gather(problem, first, end)[2]
        for t in range(first, end):
            inside, starts = t < problem.lengths, (problem.source[:, t] == START)[:, None]
            emission = problem.log_emission[word[:, t]]
            reached = torch.bmm(filtered[:, t, None], tiles[:, t - first])[:, 0]
            reached = reached.masked_fill(starts | (reached < floor), 0.0)
            scores = torch.where(starts, problem.log_start[block[:, t]] + emission, emission)
            shift = scores.amax(1)
            shift = shift.masked_fill(shift == -torch.inf, 0.0)
            weight = (scores - shift[:, None]).exp_() * torch.where(starts, 1.0, reached)
            mass = weight.sum(1)
            alive = alive & ((mass >= suspicious) | ~inside)
            going = inside & alive
            filtered[:, t + 1, :kept] = torch.where(going[:, None], weight / mass[:, None], 0.0)
            predicted[:, t] = reached
            log_likelihood += torch.where(going, mass.log() + shift, 0.0)
    return State(log_likelihood.masked_fill(~alive, -torch.inf), filtered, predicted, ~alive)


def backward(problem: Problem, state: State, grad: Tensor) -> Gradients:
    """Expected counts, weighted by `grad` [B]; nothing from suspect sequences."""
    batch, kept = problem.word.shape[0], problem.w.shape[1]
    grad = grad.masked_fill(state.suspect, 0.0).to(problem.log_start.dtype)[:, None]
    out = Gradients(*(torch.zeros_like(x, dtype=grad.dtype) for x in (
        problem.u, problem.w, problem.log_normalizer, problem.log_start, problem.log_emission, problem.initial)))
    back = torch.zeros_like(problem.initial)  # posterior of the position before, by the step to this one
    stepped = torch.zeros(batch, 1, dtype=torch.bool, device=grad.device)  # whether the next position is such a step
    for first, end in reversed(problem.spans(_TILE_BUDGET)):
        rows, columns, tiles = _gather(problem, first, end)
        filtered, predicted = state.filtered[:, first : end + 1], state.predicted[:, first:end]
        posterior, before = torch.zeros_like(predicted), torch.zeros_like(filtered[:, 1:])
        ratio = torch.zeros_like(predicted)
        for k in reversed(range(end - first)):
            inside = (first + k < problem.lengths)[:, None]
            posterior[:, k] = torch.where(stepped, back[:, :kept], grad * filtered[:, k + 1, :kept]) * inside
            stepped = problem.source[:, first + k, None] >= 0
            some = stepped & (predicted[:, k] > 0)
            ratio[:, k] = torch.where(some, posterior[:, k] / predicted[:, k], 0.0)
            ahead = torch.bmm(tiles[:, k], ratio[:, k, :, None])[:, :, 0]
            back = filtered[:, k] * ahead
            before[:, k] = back
            if first + k == 0:
                out.initial.copy_(ahead)
        source, block, word = (
            x[:, first:end].clamp_min(0).reshape(-1) for x in (problem.source, problem.block, problem.word)
        )
        pairs = (filtered[:, :-1, :, None] * tiles * ratio[:, :, None, :]).flatten(0, 1).to(rows.dtype)
        starts = (problem.source[:, first:end, None] == START) * posterior
        out.u.index_add_(0, source, matmul(pairs, columns))
        out.w.index_add_(0, block, matmul(pairs.transpose(1, 2), rows))
        out.log_normalizer.index_add_(0, source, before.flatten(0, 1), alpha=-1)
        out.log_start.index_add_(0, block, starts.flatten(0, 1))
        out.log_emission.index_add_(0, word, posterior.flatten(0, 1))
    return out
