"""Inputs of the blocked scan, and their layout for the kernels."""

from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.ops import pieces
from hmmlm.ops.common import wide
from hmmlm.ops.underflow import FLOOR

NOTHING, ENTRY, START = -3, -2, -1  # sources of positions that are not steps: beyond the length, an entry, a start


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


class BlockedProblem(NamedTuple):
    """A blocked scan in a layout that all its steps share."""

    word: Tensor  # [B, T] −1 beyond the length
    block: Tensor  # [B, T] block of the word; −1 beyond the length
    source: Tensor  # [B, T] block of the previous position; or START; or ENTRY, at position 0; or NOTHING
    lengths: Tensor  # [B]
    u: Tensor  # [M, k, h] in the dtype of products
    w: Tensor  # [M, k, h] in the dtype of products
    log_normalizer: Tensor  # [M, k] in the wide dtype, like everything below
    log_start: Tensor  # [M, k]
    log_emission: Tensor  # [V, k]
    entry: Tensor  # [B, k] log p(z_0 | past) over the states of the first word's block; unspecified without ENTRY
    initial: Tensor  # [B, k] distribution before position 0, where that is a step (see `one_step_problem`); else zero

    def differentiable(self) -> tuple[Tensor, ...]:
        """Return the inputs that have a gradient, in the order of `Gradients`."""
        return self.u, self.w, self.log_normalizer, self.log_start, self.log_emission, self.entry, self.initial

    def spans(self, budget: int) -> list[tuple[int, int]]:
        """Return time ranges [first, end), each with at most `budget` elements in its transition tiles."""
        batch, time = self.word.shape
        span = pieces.at_once(batch * self.u.shape[1] * self.w.shape[1], budget)
        return [(first, min(first + span, time)) for first in range(0, time, span)]


class BlockedForward(NamedTuple):
    """Results of the forward pass that the backward pass needs."""

    log_likelihood: Tensor  # [B] unspecified for suspect sequences
    filtered: Tensor  # [B, T + 1, k] entry t + 1 is p(z_t | x_0..t); entry 0 is `initial`
    predicted: Tensor  # [B, T, k] p(z_t | x_0..t−1) for steps; unspecified elsewhere
    suspect: Tensor  # [B] bool; underflow may matter, see `Limits`


class NextWords(NamedTuple):
    """S words for each position [B, T], to be scored in place of its word; −1 beyond the length."""

    word: Tensor  # [B, T, S]
    block: Tensor  # [B, T, S]
    entry: Tensor | None  # [B, S, k] log p(z_0 | past) over the states of the blocks of the first S words


class Gradients(NamedTuple):
    """Gradients in the layout of `BlockedProblem`, in the wide dtype."""

    u: Tensor  # [M, k, h]
    w: Tensor  # [M, k, h]
    log_normalizer: Tensor  # [M, k]
    log_start: Tensor  # [M, k]
    log_emission: Tensor  # [V, k]
    entry: Tensor  # [B, k]
    initial: Tensor  # [B, k]


class Limits(NamedTuple):
    """Limits of scaled arithmetic in float32.

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
    least_mass: float  # mass of a step below which a sequence is suspect
    lost: float  # filtered probabilities below this become zero
    tiny: float  # smallest normal number
    sure: float  # predicted probabilities from this on lose a negligible share to underflow
    tolerated: float


LIMITS = Limits(1e-34, 1e-27, FLOOR[torch.float32], torch.finfo(torch.float32).tiny, 1e-26, 1e-6)


def lay_out(
    factors: Factors,
    tokens: Tensor,
    entry: Tensor | None,
    lengths: Tensor | None,
    restart: Tensor | None,
    dtype: torch.dtype,
) -> BlockedProblem:
    """Convert the inputs to the layout of `BlockedProblem`, without synchronizing with the device."""
    block_of_word, u, w, log_normalizer, log_start, log_emission = (x.detach() for x in factors)
    (batch, time), (states, h), kept = tokens.shape, u.shape, log_emission.shape[1]
    blocks, exact = states // kept, wide(dtype)
    first = torch.full((batch, 1), START if entry is None else ENTRY, device=tokens.device)
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
    nothing = torch.zeros(batch, kept, dtype=exact, device=u.device)
    return BlockedProblem(
        word=word.contiguous(),
        block=block.contiguous(),
        source=source.contiguous(),
        lengths=lengths,
        u=u.to(dtype).contiguous().view(blocks, kept, h),
        w=w.to(dtype).contiguous().view(blocks, kept, h),
        log_normalizer=log_normalizer.to(exact).contiguous().view(blocks, kept),
        log_start=log_start.to(exact).contiguous().view(blocks, kept),
        log_emission=log_emission.to(exact).contiguous(),
        entry=nothing if entry is None else entry.detach().to(exact).contiguous(),
        initial=nothing,
    )


def one_step_problem(problem: BlockedProblem, filtered: Tensor, words: NextWords) -> BlockedProblem:
    """Return the problem of scoring `words` given the words before them: B·T·S sequences of one step each.

    Args:
        filtered: [B, T + 1, k] of the forward pass of `problem`.
    """
    inside = (problem.block >= 0)[:, :, None]
    shape = words.word.shape
    entry = filtered.new_zeros(*shape, filtered.shape[2])
    if words.entry is not None:
        entry[:, 0] = words.entry
    return problem._replace(
        word=torch.where(inside, words.word, -1).view(-1, 1),
        block=torch.where(inside, words.block, -1).view(-1, 1),
        source=problem.source[:, :, None].expand(shape).reshape(-1, 1),
        lengths=inside.expand(shape).reshape(-1).long(),
        entry=entry.flatten(0, 2),
        initial=filtered[:, :-1, None].expand(*shape, -1).flatten(0, 2),
    )
