"""Portable implementation: scaled probabilities, one batched product per step with the transition tiles of that step.

On the CPU, steps between the same blocks share a tile if that saves at least half of the tiles. Otherwise each step
has its own tile, and the tiles of a bounded range of time exist at once.

The backward pass never forms a backward probability, which could overflow. With f the filtered and q the predicted
distribution, the posterior of the pair (i, j) is f_i A_ij (γ_j / q_j), and f_i A_ij / q_j ≤ 1 is p(i | j, the past).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.ops.blocked_scan.problem import ENTRY, START, BlockedForward, Gradients, Problem, limits, read_tiles
from hmmlm.ops.common import FLOOR, exp, matmul

_TILE_BUDGET = 2**26  # elements of the transition tiles held at a time: 256 MB in float32
_LIFT = {torch.float32: 2.0**120, torch.float64: 2.0**990}
"""Filtered probabilities are multiplied by this before the product with a tile. Products of two kept values are then
never denormal (slow on CPUs), and no sum overflows."""
_WORTH_SHARING = 2**12  # elements of a tile from which computing it takes longer than looking up a shared one


class Tiles(NamedTuple):
    """P transition tiles for times `first` to `end`; positions that are not steps have some tile, which is not used."""

    first: int
    end: int
    source: Tensor  # [P] source block of each tile
    block: Tensor  # [P] target block of each tile
    rows: Tensor  # [P, k, h] factors in U of the tile's rows
    columns: Tensor  # [P, k, h] factors in W of the tile's columns
    values: Tensor  # [P, k, k]
    tile_of: Tensor | None  # [B, span] tile of each position; None: each position has its own, in order
    alike: list[bool]  # per time, whether all sequences use the same tile

    def reach(self, k: int, vectors: Tensor) -> Tensor:
        """Multiply vectors [B, n] by the tiles at time first + k."""
        lift = _LIFT[vectors.dtype]
        return self.product(k, lift * vectors).div_(lift)

    def product(self, k: int, lifted: Tensor) -> Tensor:
        """Multiply vectors that are not small; see `reach`."""
        if self.alike[k]:
            return lifted @ self._one(k)
        return torch.bmm(lifted[:, None], self._own(k))[:, 0]

    def look_back(self, k: int, vectors: Tensor) -> Tensor:
        """Multiply vectors [B, n] by the transposed tiles at time first + k."""
        if self.alike[k]:
            return vectors @ self._one(k).T
        return torch.bmm(self._own(k), vectors[:, :, None])[:, :, 0]

    def pairs(self, before: Tensor, after: Tensor) -> Tensor:
        """Sum before_i · tile_ij · after_j [P, k, k] over the positions of each tile, for vectors [B, span, ·]."""
        if self.tile_of is None:
            return before.flatten(0, 1)[:, :, None] * self.values * after.flatten(0, 1)[:, None, :]
        # in float64: `after` can be close to the float32 maximum before it is multiplied by the tile
        order = self.tile_of.flatten().argsort(stable=True)
        before, after = (x.flatten(0, 1).index_select(0, order).double() for x in (before, after))
        ends = self.tile_of.flatten().bincount(minlength=len(self.values)).cumsum(0).tolist()
        sums = torch.stack([before[i:j].T @ after[i:j] for i, j in zip([0, *ends], ends, strict=False)])
        return sums.mul_(self.values).to(self.values.dtype)

    def _one(self, k: int) -> Tensor:
        assert self.tile_of is not None
        return self.values[int(self.tile_of[0, k])]

    def _own(self, k: int) -> Tensor:
        if self.tile_of is None:
            return self.values.view(-1, self.end - self.first, *self.values.shape[1:])[:, k]
        return self.values.index_select(0, self.tile_of[:, k])


def _all_tiles(problem: Problem, backwards: bool = False) -> Iterator[Tiles]:
    """Yield the tiles of all times, one range of time after another."""
    blocks, kept = problem.w.shape[:2]
    if not problem.u.is_cuda and kept**2 >= _WORTH_SHARING:  # on the GPU, counting them would synchronize
        pair = problem.source.clamp_min(0) * blocks + problem.block.clamp_min(0)
        distinct, index = pair.unique(return_inverse=True)
        if 2 * len(distinct) <= pair.numel() and len(distinct) * kept**2 <= _TILE_BUDGET:
            alike = (index == index[:1]).all(0).tolist()
            yield _make(problem, 0, pair.shape[1], distinct // blocks, distinct % blocks, index, alike)
            return
    spans = problem.spans(_TILE_BUDGET)
    for first, end in reversed(spans) if backwards else spans:
        source, block = (x[:, first:end].clamp_min(0).reshape(-1) for x in (problem.source, problem.block))
        yield _make(problem, first, end, source, block, None, [False] * (end - first))


def _make(
    problem: Problem, first: int, end: int, source: Tensor, block: Tensor, index: Tensor | None, alike: list[bool]
) -> Tiles:
    """Compute the tiles from blocks `source` [P] to blocks `block` [P] for times `first` to `end`."""
    if problem.table is not None:
        rows, columns = problem.u[:0], problem.w[:0]
        return Tiles(first, end, source, block, rows, columns, read_tiles(problem.table, source, block), index, alike)
    rows, columns = problem.u.index_select(0, source), problem.w.index_select(0, block)
    scores = matmul(rows, columns.transpose(1, 2))
    values = exp(scores.sub_(problem.log_normalizer.index_select(0, source)[:, :, None]))
    return Tiles(first, end, source, block, rows, columns, values, index, alike)


def forward(problem: Problem) -> BlockedForward:
    """Compute filtered distributions and log-likelihoods."""
    batch, time = problem.word.shape
    dtype, kept = problem.log_start.dtype, problem.w.shape[1]
    limit, lift = limits(dtype), _LIFT[dtype]
    filtered = torch.zeros(batch, time + 1, kept, dtype=dtype, device=problem.u.device)
    filtered[:, 0] = problem.initial
    predicted = torch.zeros(batch, time, kept, dtype=dtype, device=problem.u.device)
    log_likelihood = torch.zeros(batch, dtype=dtype, device=problem.u.device)
    stray = torch.zeros_like(problem.initial)  # times `lift`: the mass that each state may be missing (see `Limits`)
    missing = log_likelihood.new_zeros(time, batch)  # the sum of `stray` after each step
    alive = torch.ones(batch, dtype=torch.bool, device=problem.u.device)
    word, block = problem.word.clamp_min(0), problem.block.clamp_min(0)
    for tiles in _all_tiles(problem):
        for t in range(tiles.first, tiles.end):
            source, emission = problem.source[:, t, None], problem.log_emission[word[:, t]]
            inside, starts = t < problem.lengths, (source == START) | (source == ENTRY)
            begun = torch.where(source == ENTRY, problem.entry, problem.log_start[block[:, t]])
            reached = tiles.reach(t - tiles.first, filtered[:, t])
            faint = reached < limit.sure
            reached = reached.masked_fill(starts | (reached < limit.floor), 0.0)
            scores = torch.where(starts, begun + emission, emission)
            shift = scores.amax(1)
            shift = shift.masked_fill(shift == -torch.inf, 0.0)
            relative = (scores - shift[:, None]).exp_()
            weight = relative * torch.where(starts, 1.0, reached)
            mass = weight.sum(1)
            strayed = tiles.product(t - tiles.first, stray)
            strayed = torch.where(faint, strayed + 2 * lift * limit.floor, strayed).masked_fill_(starts, 0.0)
            strayed = (
                strayed.mul_(relative).add_(2 * lift * limit.tiny).div_(mass[:, None]).clamp_min_(lift * limit.lost)
            )
            stray.copy_(strayed)
            torch.sum(strayed, 1, out=missing[t])
            alive = alive & ((mass >= limit.suspicious) | ~inside)
            going = inside & alive
            here = weight / mass[:, None]
            filtered[:, t + 1] = here.masked_fill_(~going[:, None] | (here < limit.lost), 0.0)
            predicted[:, t] = reached
            log_likelihood += torch.where(going, mass.log() + shift, 0.0)
    beyond = torch.arange(time, device=missing.device)[:, None] >= problem.lengths
    suspect = ~(alive & ((missing <= lift * limit.tolerated) | beyond).all(0))
    return BlockedForward(log_likelihood, filtered, predicted, suspect)


def backward(
    problem: Problem,
    result: BlockedForward,
    grad: Tensor,
    extra: Tensor | None = None,
    add_pairs: Callable[[Tiles, Tensor], None] | None = None,
) -> Gradients:
    """Compute expected counts weighted by `grad` [B]; suspect sequences contribute nothing.

    Args:
        extra: [B, T + 1, k] added to the posterior of each position (entry t + 1 is that of t) from elsewhere.
        add_pairs: called with tiles and their expected transitions [P, k, k]; None: these become gradients of the
            factors.
    """
    batch = problem.word.shape[0]
    grad = grad.masked_fill(result.suspect, 0.0).to(problem.log_start.dtype)[:, None]
    out = Gradients(*(torch.zeros_like(x, dtype=grad.dtype) for x in problem.differentiable()))
    lost = FLOOR[grad.dtype]
    back = torch.zeros_like(problem.initial)  # posterior of the previous position, from the step to this one
    stepped = torch.zeros(batch, 1, dtype=torch.bool, device=grad.device)  # whether the next position is a step
    for tiles in _all_tiles(problem, backwards=True):
        first, end = tiles.first, tiles.end
        filtered, predicted = result.filtered[:, first : end + 1], result.predicted[:, first:end]
        posterior, before = torch.zeros_like(predicted), torch.zeros_like(filtered[:, 1:])
        ratio = torch.zeros_like(predicted)
        for k in reversed(range(end - first)):
            inside = (first + k < problem.lengths)[:, None]
            posterior[:, k] = torch.where(stepped, back, grad * filtered[:, k + 1]) * inside
            if extra is not None:
                posterior[:, k] += extra[:, first + k + 1]
            stepped = problem.source[:, first + k, None] >= 0
            some = stepped & (predicted[:, k] > 0) & (posterior[:, k].abs() >= lost)
            ratio[:, k] = torch.where(some, posterior[:, k] / predicted[:, k], 0.0)
            ahead = tiles.look_back(k, ratio[:, k])
            back = filtered[:, k] * ahead
            before[:, k] = back
            if first + k == 0:
                out.initial.copy_(ahead)
                out.entry.copy_(posterior[:, 0] * (problem.source[:, :1] == ENTRY))
        source, block, word = (
            x[:, first:end].clamp_min(0).reshape(-1) for x in (problem.source, problem.block, problem.word)
        )
        pairs = tiles.pairs(filtered[:, :-1], ratio).to(tiles.rows.dtype)
        starts = (problem.source[:, first:end, None] == START) * posterior
        if add_pairs is not None:
            add_pairs(tiles, pairs)
        else:
            out.u.index_add_(0, tiles.source, matmul(pairs, tiles.columns))
            out.w.index_add_(0, tiles.block, matmul(pairs.transpose(1, 2), tiles.rows))
        out.log_normalizer.index_add_(0, source, before.flatten(0, 1), alpha=-1)
        out.log_start.index_add_(0, block, starts.flatten(0, 1))
        out.log_emission.index_add_(0, word, posterior.flatten(0, 1))
    return out
