"""Inputs of the blocked scan, and their layout for the kernels."""

from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.ops.common import FLOOR, wide

NOTHING, START = -2, -1  # sources of positions that are not steps: beyond the length, or a start


class Factors(NamedTuple):
    """Parameters of an HMM with M blocks of k states, where each word belongs to one block.

    State m·k + i is state i of block m; log A[i, j] = u_i · w_j − log_normalizer_i.
    """

    block_of_word: Tensor  # [V]
    u: Tensor  # [Z, h]
    w: Tensor  # [Z, h]
    log_normalizer: Tensor  # [Z]
    log_start: Tensor  # [Z]
    log_emission: Tensor  # [V, k] row = word, over the states of its block

    def to(self, dtype: torch.dtype) -> "Factors":
        """Return the factors with all but `block_of_word` in `dtype`."""
        return Factors(self.block_of_word, *(value.to(dtype) for value in self[1:]))


class CarriedRows(NamedTuple):
    """The carry of a window and the transition rows of the carried states.

    The carried states may differ from those of the present factors (state dropout). Sequences that carry the same
    states may share a group of rows: all of them, as with a single block, or those that `group` names.
    """

    filtered: Tensor  # [B, kept_then] p(z | all previous words); sums to zero only if they were impossible
    u: Tensor  # [N, kept_then, h]
    log_normalizer: Tensor  # [N, kept_then] logsumexp of those rows against the present W
    group: Tensor | None = None  # [B] group 0..N−1 of each sequence; None: its own (N = B), or the only one (N = 1)

    def groups(self, batch: int) -> Tensor:
        """Return the group of each sequence [B]."""
        if self.group is not None:
            return self.group
        return torch.arange(self.u.shape[0], device=self.u.device).expand(batch)

    def rows(self, index: Tensor, dtype: torch.dtype) -> "CarriedRows":
        """Return the sequences at `index` in `dtype`."""
        group = self.groups(len(self.filtered))[index]
        return CarriedRows(self.filtered[index].to(dtype), *(x[group].to(dtype) for x in (self.u, self.log_normalizer)))


class Problem(NamedTuple):
    """A blocked scan in a layout that all its steps share.

    The source rows of steps form G groups of R = max(kept, kept_then) rows: the M blocks, then the carried rows as one
    group per sequence, or one for all. The first step of a window therefore has the same form as every other step.
    """

    word: Tensor  # [B, T] −1 beyond the length
    block: Tensor  # [B, T] block of the word; −1 beyond the length
    source: Tensor  # [B, T] group of the previous position's states, or START, or NOTHING
    lengths: Tensor  # [B]
    u: Tensor  # [G, R, h] in the dtype of products; zero-padded to R rows
    w: Tensor  # [M, kept, h] in the dtype of products
    log_normalizer: Tensor  # [G, R] in the wide dtype, like everything below
    log_start: Tensor  # [M, kept]
    log_emission: Tensor  # [V, kept]
    initial: Tensor  # [B, R] the carry; zero if there is none
    table: Tensor | None = None
    """[G, R, M, kept] probabilities of all transitions, to read tiles from; then u and w have h = 0 and log_normalizer
    is not used."""

    def differentiable(self) -> tuple[Tensor, ...]:
        """Return the inputs that have a gradient, in the order of `Gradients`."""
        return self.u, self.w, self.log_normalizer, self.log_start, self.log_emission, self.initial

    def spans(self, budget: int) -> list[tuple[int, int]]:
        """Return time ranges [first, end), each with at most `budget` elements in its transition tiles."""
        batch, time = self.word.shape
        span = max(1, budget // max(1, batch * self.u.shape[1] * self.w.shape[1]))
        return [(first, min(first + span, time)) for first in range(0, time, span)]


class BlockedForward(NamedTuple):
    """Results of the forward pass that the backward pass needs."""

    log_likelihood: Tensor  # [B] unspecified for suspect sequences
    filtered: Tensor  # [B, T + 1, R] entry t + 1 is p(z_t | x_0..t); entry 0 is the carry
    predicted: Tensor  # [B, T, kept] p(z_t | x_0..t−1) for steps; unspecified elsewhere
    suspect: Tensor  # [B] bool; underflow may matter, see `Limits`


class NextWords(NamedTuple):
    """S words for each position [B, T], to be scored in place of its word; −1 beyond the length."""

    word: Tensor  # [B, T, S]
    block: Tensor  # [B, T, S]


class Gradients(NamedTuple):
    """Gradients in the layout of `Problem`, in the wide dtype."""

    u: Tensor  # [G, R, h]
    w: Tensor  # [M, kept, h]
    log_normalizer: Tensor  # [G, R]
    log_start: Tensor  # [M, kept]
    log_emission: Tensor  # [V, kept]
    initial: Tensor  # [B, R]


class Limits(NamedTuple):
    """Limits of scaled arithmetic in one dtype.

    Mass that underflows may matter later, when the states that kept theirs explain the words worse. The recursion
    therefore also bounds `stray`, the mass that each state may be missing, relative to the mass kept:

        stray_t(j) = max(lost, (e_j (Σ_i stray_t−1(i) A_ij + [predicted_j < sure] 2 floor) + 2 tiny) / mass_t),

    with e_j the emission probability relative to the largest, and without the sum where the chain starts. The sum moves
    earlier losses as the recursion moves mass; the other terms bound what the step itself sets to zero, which is
    negligible where predicted_j ≥ sure. While stray sums to at most `tolerated` over the states, likelihoods, filtered
    distributions and posteriors lack at most about that share. Otherwise the sequence is suspect.
    """

    floor: (
        float  # predicted probabilities below this become zero; the reciprocal bounds the ratios of the backward pass
    )
    suspicious: float  # mass of a step below which a sequence is suspect
    lost: float  # filtered probabilities below this become zero
    tiny: float  # smallest normal number
    sure: float  # predicted probabilities from this on lose a negligible share to underflow
    tolerated: float


def limits(dtype: torch.dtype) -> Limits:
    """Return the limits of a dtype."""
    tiny = torch.finfo(dtype).tiny
    if dtype == torch.float32:
        return Limits(1e-34, 1e-27, FLOOR[dtype], tiny, 1e-26, 1e-6)
    return Limits(1e-290, 1e-270, FLOOR[dtype], tiny, 1e-280, 1e-12)


def lay_out(
    factors: Factors,
    tokens: Tensor,
    carried: CarriedRows | None,
    lengths: Tensor | None,
    restart: Tensor | None,
    dtype: torch.dtype,
) -> Problem:
    """Convert the inputs to the layout of `Problem`, without synchronizing with the device."""
    block_of_word, u, w, log_normalizer, log_start, log_emission = (x.detach() for x in factors)
    batch, time = tokens.shape
    kept, h = log_emission.shape[1], u.shape[1]
    blocks, exact = u.shape[0] // kept, wide(dtype)
    then = 0 if carried is None else carried.filtered.shape[1]
    rows = max(kept, then)

    if carried is None:
        first = torch.full((batch, 1), START, device=tokens.device)
    else:
        first = blocks + carried.groups(batch)[:, None]
    if lengths is None:
        lengths = torch.full((batch,), time, device=tokens.device)
        word, block = tokens, block_of_word[tokens]
        source = torch.cat([first, block[:, :-1]], 1)
    else:
        outside = torch.arange(time, device=tokens.device) >= lengths[:, None]
        word = tokens.masked_fill(outside, -1)
        block = block_of_word[word.clamp_min(0)].masked_fill_(outside, -1)
        source = torch.cat([first, block[:, :-1]], 1).masked_fill_(outside, NOTHING)
    if restart is not None:
        source = source.masked_fill_(restart & (source != NOTHING), START)

    own_u, own_normalizer = u.to(dtype).view(blocks, kept, h), log_normalizer.to(exact).view(-1, kept)
    filtered = torch.zeros(batch, rows, dtype=exact, device=u.device)
    if carried is not None:
        pad_own, pad_then = rows - kept, rows - then
        own_u, own_normalizer = _pad(own_u, pad_own, 1), _pad(own_normalizer, pad_own, 1)
        own_u = torch.cat([own_u, _pad(carried.u.detach().to(dtype), pad_then, 1)])
        own_normalizer = torch.cat([own_normalizer, _pad(carried.log_normalizer.detach().to(exact), pad_then, 1)])
        filtered[:, :then] = carried.filtered.detach()
    return Problem(
        word=word.contiguous(),
        block=block.contiguous(),
        source=source.contiguous(),
        lengths=lengths,
        u=own_u.contiguous(),
        w=w.to(dtype).contiguous().view(blocks, kept, h),
        log_normalizer=own_normalizer.contiguous(),
        log_start=log_start.to(exact).contiguous().view(blocks, kept),
        log_emission=log_emission.to(exact).contiguous(),
        initial=filtered,
    )


def tile_lines(source: Tensor, block: Tensor, rows: int, blocks: int) -> Tensor:
    """Return the lines [P·R] of a table [G·R·M, kept] with the tiles from groups `source` [P] to blocks `block` [P]."""
    return ((source[:, None] * rows + torch.arange(rows)) * blocks + block[:, None]).flatten()


def read_tiles(table: Tensor, source: Tensor, block: Tensor) -> Tensor:
    """Return the tiles [P, R, kept] of a table [G, R, M, kept] from groups `source` [P] to blocks `block` [P]."""
    _, rows, blocks, kept = table.shape
    return table.view(-1, kept).index_select(0, tile_lines(source, block, rows, blocks)).view(-1, rows, kept)


def one_step_problem(problem: Problem, filtered: Tensor, words: NextWords) -> Problem:
    """Return the problem of scoring `words` given the words before them: B·T·S sequences of one step each.

    Args:
        filtered: [B, T + 1, R] of the forward pass of `problem`.
    """
    inside = (problem.block >= 0)[:, :, None]
    shape = words.word.shape
    return problem._replace(
        word=torch.where(inside, words.word, -1).view(-1, 1),
        block=torch.where(inside, words.block, -1).view(-1, 1),
        source=problem.source[:, :, None].expand(shape).reshape(-1, 1),
        lengths=inside.expand(shape).reshape(-1).long(),
        initial=filtered[:, :-1, None].expand(*shape, -1).flatten(0, 2),
    )


def _pad(x: Tensor, more: int, dim: int) -> Tensor:
    """Append `more` zeros along `dim`."""
    if not more:
        return x
    shape = list(x.shape)
    shape[dim] = more
    return torch.cat([x, x.new_zeros(shape)], dim)
