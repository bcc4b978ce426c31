"""The forward recursion of `generic_scan` in scaled probabilities, and the bound on what underflow may take from it.

Sequences that underflow may have changed run again in log space and float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.emissions import Blocked
from hmmlm.numerics.semirings import BOOLEAN, PROBABILITY
from hmmlm.numerics.support import BlockSupport, Support, some_rows, spread
from hmmlm.ops.common import NEG_INF, finite, log_normalize
from hmmlm.ops.underflow import FLOOR, LIFT, TOLERANCE, flush
from hmmlm.scan.composition import Composition
from hmmlm.scan.lattice import Lattice, Packed, SortedBatch, endings
from hmmlm.scan.recursions import forward, last_filtered, observe
from hmmlm.scan.steps import Steps, add_step, between, steps_of
from hmmlm.transitions.tiled import TiledTransition


class GenericProblem(NamedTuple):
    """What a scan computes, and how."""

    hmm: Composition  # detached
    batch: SortedBatch
    words: Tensor | None  # [B, T, S] to be scored in place of tokens, rows as in the batch
    exact_carry: bool
    in_log_space: bool
    learns: bool


class Words(NamedTuple):
    """The words in place of tokens after the first, N of them: time-major, as the rows of the batch."""

    steps: Steps
    before: Tensor  # [N, K] filtered distributions
    source: Support
    word: Tensor  # [N]
    support: Support
    predicted: Tensor  # [N, K]
    weight: Tensor  # [N, K] of a state: p(word | z) / p(word | past)
    log_probs: Tensor  # [N] log p(word | past); 0 where it underflows


class Run(NamedTuple):
    """The forward recursion, and its exact form for the sequences that underflow may have changed."""

    lattice: Lattice | None  # probabilities; None if everything is computed in log space
    steps: Steps
    total: Tensor  # [B] log p(x) in float64
    last: Tensor  # [B, K] carry
    words: Words | None
    rows: Tensor  # [m] sequences that underflow may have changed
    exact: Lattice | None  # of these, in log space and float64, longest first
    model: Composition  # in float64


def run_scaled(problem: GenericProblem, first: Tensor) -> Run:
    hmm, batch = problem.hmm, problem.batch
    lattice, steps, words = None, Steps(PROBABILITY, hmm.transition), None
    if problem.in_log_space:
        rows, model = torch.arange(len(first), device=first.device), hmm
        total, last = first.new_empty(len(first), dtype=torch.float64), first.new_empty(0)
    else:
        supports, (factors, offsets) = observe(hmm, batch, None, _relative)
        lattice, steps = Lattice.begin(batch, supports, factors), between(hmm.transition, batch, supports)
        ending, predicted, peak = {t for t, _ in endings(batch.active)}, dict[int, Tensor](), finite(first.amax(1))
        begin = PROBABILITY.from_log(first - peak[:, None])
        for t in range(len(batch.active)):
            reached = add_step(steps, lattice, begin)
            if t in ending:
                predicted[t] = reached
        logs = Packed(batch, lattice.scales.whole.double().log() + offsets.whole)
        total = lattice._replace(scales=logs).log_likelihood() + peak
        last = _carry(hmm, lattice, predicted)
        rows, model = _find_suspect(problem, steps, lattice, first, predicted).nonzero()[:, 0], hmm
        if problem.words is not None and len(batch.active) > 1:
            words = _score_words(problem, lattice)
        if len(rows):
            model = hmm.to(torch.float64)
    exact = None
    if len(rows):
        exact = forward(model, _select(batch, rows), first=first[rows].to(model.dtype))
        order, found = rows[exact.batch.order], last_filtered(model, exact)
        if is_narrow(hmm, batch):
            found = _narrow(model, exact, found)
        last = found[exact.batch.order.argsort()] if problem.in_log_space else last.index_copy(0, order, found)
        total = total.index_copy(0, order, exact.log_likelihood())
    return Run(lattice, steps, total, last, words, rows, exact, model)


def _carry(hmm: Composition, lattice: Lattice, predicted: dict[int, Tensor]) -> Tensor:
    """Return log p(z | x) [B, K] of the last tokens in float64.

    The last step is taken in log space, so that no emission underflows.

    Args:
        predicted: p(z_t | x_1..t−1) [n, K] at the steps where sequences end.
    """
    narrow, pieces = is_narrow(hmm, lattice.batch), list[Tensor]()
    for t, ended in endings(lattice.batch.active):
        scores = hmm.emission.score(lattice.batch.tokens[ended, t], lattice.batch.missing[t])[1]
        joint = log_normalize((predicted[t][ended].log() + scores).double())
        support = some_rows(lattice.supports[t], ended)
        pieces.append(joint if narrow else spread(joint, support, hmm.num_states, NEG_INF))
    return torch.cat(pieces[::-1])


def is_narrow(hmm: Composition, batch: SortedBatch) -> bool:
    """Return whether carries are over the states of a single block."""
    return isinstance(hmm.emission, Blocked) and not any(batch.missing)


def _relative(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return emission probabilities relative to the largest of their row, times LIFT, and the log of what that is."""
    lift, largest = LIFT[scores.dtype], finite(scores.amax(1))
    root = (0.5 * (scores - largest[:, None])).exp_()  # of a probability that may be below all numbers
    return flush(root * (root * lift)), largest.double() - math.log(lift)


def _score_words(problem: GenericProblem, lattice: Lattice) -> Words:
    """Score the words in place of tokens; all steps at once."""
    hmm, words = problem.hmm, problem.words
    assert words is not None and isinstance(hmm.transition, TiledTransition)
    count, batch, blocks = words.shape[2], lattice.batch, lattice.supports.blocks
    later, repeated = slice(batch.active[0], None), batch.before.repeat_interleave(count)
    assert blocks is not None
    before, source = lattice.filtered.whole[repeated], blocks.rows(repeated)
    word = words[batch.row[later], batch.step[later]].flatten()
    support, scores = hmm.emission.score(word, missing=False)
    scores, offset = _relative(scores)
    assert isinstance(support, BlockSupport)
    steps = steps_of(hmm.transition, source, support, [len(word)])
    predicted = steps.forward(1, before, source, support)
    mass = (predicted * scores).sum(1)
    certain = mass >= FLOOR[mass.dtype]
    weight = torch.where(certain[:, None], scores / mass[:, None], 0.0)
    log_probs = torch.where(certain, mass.log() + offset, 0.0)
    return Words(steps, before, source, word, support, predicted, weight, log_probs)


def _narrow(hmm: Composition, lattice: Lattice, log_probs: Tensor) -> Tensor:
    """Restrict values [m, Z] of the last tokens to their blocks [m, k]."""
    supports = [some_rows(lattice.supports[t], ended) for t, ended in endings(lattice.batch.active)]
    return BlockSupport(torch.cat([each.blocks for each in supports[::-1]]), hmm.emission.width).restrict(log_probs)  # type: ignore[union-attr, attr-defined]


def _select(batch: SortedBatch, rows: Tensor) -> SortedBatch:
    """Return some rows of a batch, which are in its order."""
    counts = (rows[:, None] < torch.tensor(batch.active, device=rows.device)).sum(0)
    active, order = [n for n in counts.tolist() if n], torch.arange(len(rows), device=rows.device)
    return SortedBatch(batch.tokens[rows], active, batch.missing[: len(active)], order)  # supports stay the same


def _find_suspect(
    problem: GenericProblem, steps: Steps, lattice: Lattice, first: Tensor, predicted: dict[int, Tensor]
) -> Tensor:
    """Return a mask [B] of the sequences that underflow may have changed by more than TOLERANCE."""
    hmm, batch, dtype = problem.hmm, lattice.batch, problem.hmm.dtype
    least = torch.stack([values.amin() for values in lattice.filtered.pieces()]).amin()
    scale = lattice.scales.whole.amin()
    loss = 2 * hmm.num_states * FLOOR[dtype] * LIFT[dtype]
    if bool(least * TOLERANCE[dtype] * scale >= loss) and bool(first.amin() > math.log(FLOOR[dtype])):
        return torch.zeros(len(first), dtype=torch.bool, device=first.device)  # every value is accurate
    ends = predicted if problem.exact_carry else {}
    mask = _lose(steps, lattice, ends, None)
    if bool(mask.any()):
        supports, (emits,) = observe(hmm, batch, None, lambda scores: (BOOLEAN.from_log(scores),))
        reachable, possible = Lattice.begin(batch, supports, emits), Steps(BOOLEAN, hmm.transition)
        for _ in batch.active:
            add_step(possible, reachable, BOOLEAN.from_log(first))
        mask = _lose(steps, lattice, ends, reachable)
    return mask


def _lose(steps: Steps, lattice: Lattice, predicted: dict[int, Tensor], reachable: Lattice | None) -> Tensor:
    """Return a mask [B] of the sequences that may have lost more than TOLERANCE of their mass to underflow.

    A recursion beside the filter bounds the mass l_t(j) that each state lacks, relative to all that is kept. A step
    moves the losses before it as it moves mass. To a state of emission e it adds at most 2 FLOOR of its prediction,
    which is negligible where that is sure, and FLOOR each of the emission and of the result:

        l_t(j) = (Σ_i l_t−1(i) A_ij + [not sure] 2 FLOOR) e_j / p(x_t | past) + FLOOR / p(x_t | past) + FLOOR.

    What is lost at the end is missing in the likelihood, and what is lost of a path, in its posterior.

    Args:
        predicted: p(z_t | x_1..t−1) [n, K] at steps where sequences end, of which every state has to be accurate.
        reachable: in Booleans; states that are not reachable have nothing to lose.
    """
    dtype, device = lattice.filtered[0].dtype, lattice.filtered[0].device
    floor, most = FLOOR[dtype], TOLERANCE[dtype] / FLOOR[dtype]  # losses are in units of FLOOR
    mask, lost = torch.zeros(len(lattice.filtered[0]), dtype=torch.bool, device=device), None
    ending = {t: ended for t, ended in endings(lattice.batch.active) if t in predicted}
    for t, (filtered, scores, scale) in enumerate(zip(lattice.filtered, lattice.scores, lattice.scales, strict=True)):
        rows, support, total = len(filtered), lattice.supports[t], scale.clamp_min(torch.finfo(dtype).tiny)[:, None]
        moved = torch.zeros_like(filtered)
        if lost is not None:
            moved = steps.forward(t, lost[:rows], some_rows(lattice.supports[t - 1], slice(rows)), support)
        sure = filtered * total * TOLERANCE[dtype] >= scores * floor
        lost = ((moved + 2 * ~sure) * (scores / total) + (1 + 1 / total)).nan_to_num(nan=most).clamp_max(most)
        if reachable is not None:
            lost, moved = lost * reachable.filtered[t], moved * reachable.filtered[t]
        mask[:rows] |= ~(lost.sum(1) < most)
        if t in ending:
            before, ended = predicted[t][ending[t]] * TOLERANCE[dtype], ending[t]
            possible = torch.ones_like(before) if reachable is None else reachable.filtered[t][ended]
            mask[ended] |= ((moved[ended] + 2 * (before < floor)) * floor * possible > before).any(1)
    return mask
