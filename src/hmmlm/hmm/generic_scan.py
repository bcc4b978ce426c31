"""The likelihood of any HMM as a differentiable function: scaled probabilities over the steps of its transition.

The gradient is the expected counts, in bulk: of a transition the derivative of Σ_n x_n A y_n, with x the filtered
distributions and y the scaled messages. Sequences that underflow may have changed are computed again in log space and
float64.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.hmm.composition import Composition
from hmmlm.hmm.lattice import Lattice, SortedBatch, add_step, stack_steps, stack_together
from hmmlm.hmm.recursions import last_filtered, messages_back, observations, predict_first, sort_batch
from hmmlm.hmm.union_scan import Segments
from hmmlm.numerics.semirings import BOOLEAN, LOG, PROBABILITY, Semiring
from hmmlm.numerics.support import first_rows, some_rows
from hmmlm.ops.common import FLOOR, NEG_INF, Carry, Scan, finite, flush, without_autocast
from hmmlm.ops.scan.scaled import TOLERANCE

_CELLS = 2**22  # of tiles of the transition whose counts are computed together
LIFT = {torch.float32: 1e30, torch.float64: 1e280}
"""Emission probabilities are relative to the largest of their row, times this: they underflow far below FLOOR."""


def generic_scan(
    hmm: Composition,
    tokens: Tensor,
    lengths: Tensor | None,
    carry: Carry | None,
    restart: Tensor | None,
    exact_carry: bool = True,
) -> Scan:
    """Compute log p(x) [B] and the carry; see `HMM.scan`. A stretch between two restarts is a sequence of its own."""
    cut = Segments.of(tokens, lengths, restart)
    batch = sort_batch(hmm, cut.tokens, cut.lengths)
    log_initial = None if carry is None else carry.over_all(hmm.states)[cut.row[batch.order]].to(hmm.dtype)
    first = next(iter(observations(hmm, batch)))
    entry = predict_first(hmm, first, log_initial)
    if log_initial is not None and cut.restart is not None:
        again = cut.restart[batch.order, :1]
        entry = torch.where(again, predict_first(hmm, first, None), entry)
    names, parameters = zip(*hmm.parameters().items(), strict=True)
    learns = torch.is_grad_enabled() and (hmm.requires_grad or entry.requires_grad)
    log_likelihood, last = _GenericScan.apply(hmm.detach(), batch, names, exact_carry, learns, entry, *parameters)
    totals = batch.unsort(log_likelihood)
    total = totals.new_zeros(len(tokens)).index_add(0, cut.row, totals)
    total = torch.where(total.detach() == NEG_INF, NEG_INF, total)  # impossible: no gradient of other segments
    return Scan(total.to(hmm.dtype), Carry(batch.unsort(last)[cut.last]))


class _Run(NamedTuple):
    """The forward recursion, and its exact form for the sequences that underflow may have changed."""

    lattice: Lattice  # probabilities
    offsets: list[Tensor]  # [n] log of what the scores of each step are relative to
    lost: Tensor  # [B] bool, rows as in the batch
    rows: Tensor  # [m] those that are
    exact: Lattice | None  # of these, in log space and float64, longest first
    model: Composition  # in float64


class _GenericScan(torch.autograd.Function):
    """Autograd function of `generic_scan`: rows as in the batch."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hmm: Composition,
        batch: SortedBatch,
        names: tuple[str, ...],
        exact: bool,
        learns: bool,
        entry: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if learns or not exact:
            ctx.run = run = _run(hmm, batch, entry)
            ctx.hmm, ctx.names = hmm, names
            scales = [
                scale.double().log() + offset for scale, offset in zip(run.lattice.scales, run.offsets, strict=True)
            ]
            total = run.lattice._replace(scales=scales).log_likelihood()
            ctx.impossible = total == NEG_INF
            joint = [values.log() for values in run.lattice.filtered]
            last = last_filtered(hmm, run.lattice._replace(filtered=joint))
            if run.exact is not None:
                order = run.rows[run.exact.batch.order]
                total = total.index_copy(0, order, run.exact.log_likelihood())
                last = last.index_copy(0, order, last_filtered(hmm, run.exact))
        if exact:  # in log space, where no state of the carry is lost
            lattice = _in_log_space(hmm, batch, entry)
            total, last = lattice.log_likelihood(), last_filtered(hmm, lattice)
        ctx.mark_non_differentiable(last)
        return total, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hmm, run = ctx.hmm, ctx.run
        seed = torch.where(run.lost | ctx.impossible, 0.0, grad.to(hmm.dtype))
        with without_autocast(grad):
            entry, gradients = _count(hmm, run.lattice, PROBABILITY, seed, _smooth(hmm, run.lattice, seed))
            if run.exact is not None:
                order = run.rows[run.exact.batch.order]
                own = grad[order].double() * (run.exact.log_likelihood() > NEG_INF)
                more, found = _count(run.model, run.exact, LOG, own, _log_smooth(run.model, run.exact, own))
                entry.index_add_(0, order, more.to(entry))
                gradients = {name: value + found[name].to(value) for name, value in gradients.items()}
        return None, None, None, None, None, entry, *(gradients.get(name) for name in ctx.names)


# --- forward ---


def _run(hmm: Composition, batch: SortedBatch, entry: Tensor) -> _Run:
    lift = LIFT[hmm.dtype]
    lattice, offsets = Lattice(batch, [], [], [], []), list[Tensor]()
    peak = finite(entry.amax(1))
    first = PROBABILITY.from_log(entry - peak[:, None])
    for support, scores in observations(hmm, batch):
        largest = finite(scores.amax(1))
        root = (0.5 * (scores - largest[:, None])).exp_()  # of a probability that may be below all numbers
        add_step(PROBABILITY, hmm.transition, lattice, (support, flush(root * (root * lift))), first)
        offsets.append(largest.double() - math.log(lift))
    offsets[0] = offsets[0] + peak
    lost = _find_lost(hmm, lattice, entry)
    rows, exact, model = lost.nonzero()[:, 0], None, hmm
    if len(rows):
        model = hmm.to(torch.float64)
        exact = _in_log_space(model, _select(batch, rows), entry[rows].double())
    return _Run(lattice, offsets, lost, rows, exact, model)


def _in_log_space(hmm: Composition, batch: SortedBatch, entry: Tensor) -> Lattice:
    lattice = Lattice(batch, [], [], [], [])
    for observed in observations(hmm, batch):
        add_step(LOG, hmm.transition, lattice, observed, entry)
    return lattice


def _select(batch: SortedBatch, rows: Tensor) -> SortedBatch:
    """Return some rows of a batch, which are in its order."""
    lengths = torch.tensor(batch.active, device=rows.device)
    active = [int((rows < n).sum()) for n in lengths]
    count = sum(n > 0 for n in active)  # missing tokens as in the batch: supports stay the same
    return SortedBatch(
        batch.tokens[rows], active[:count], batch.missing[:count], torch.arange(len(rows), device=rows.device)
    )


def _find_lost(hmm: Composition, lattice: Lattice, entry: Tensor) -> Tensor:
    """Return a mask [B] of the sequences that underflow may have changed.

    Every value may be wrong by FLOOR. A step amplifies that by a factor of at most 2 K e / p(x_t | past), for a state
    with emission e that K states lead to. That is negligible where it stays below FLOOR or below TOLERANCE of the
    value, or where the state is impossible.
    """
    dtype, states = hmm.dtype, max(values.shape[1] for values in lattice.filtered)
    loss = 2 * max(states, hmm.states) * FLOOR[dtype]
    least = torch.stack([values.amin() for values in lattice.filtered]).amin()
    scale = torch.stack([values.amin() for values in lattice.scales]).amin()
    mask = torch.zeros(len(entry), dtype=torch.bool, device=entry.device)
    if bool(least * TOLERANCE[dtype] * scale >= loss * LIFT[dtype]) and bool(entry.amin() > math.log(FLOOR[dtype])):
        return mask
    mask = _suspects(lattice, loss, None)
    if not bool(mask.any()):
        return mask
    reachable, first = Lattice(lattice.batch, [], [], [], []), BOOLEAN.from_log(entry)
    for support, scores in observations(hmm, lattice.batch):
        add_step(BOOLEAN, hmm.transition, reachable, (support, BOOLEAN.from_log(scores)), first)
    return _suspects(lattice, loss, reachable)


def _suspects(lattice: Lattice, loss: float, reachable: Lattice | None) -> Tensor:
    """Return the mask of `_find_lost`; only states that are reachable count."""
    mask = torch.zeros(len(lattice.filtered[0]), dtype=torch.bool, device=lattice.filtered[0].device)
    for t, (filtered, scores, scale) in enumerate(zip(lattice.filtered, lattice.scores, lattice.scales, strict=True)):
        floor, tolerance = FLOOR[filtered.dtype], TOLERANCE[filtered.dtype]
        lost = loss * scores / scale[:, None]
        # Negated: NaN counts as lost. Emissions underflow below 1 / LIFT, which matters if they explain the word best.
        wrong = ~((lost <= floor) | (filtered * tolerance >= lost)) | ~(scale >= 1.0)[:, None]
        if reachable is not None:
            wrong &= reachable.filtered[t] > 0
        mask[: len(filtered)] |= wrong.any(1)
    return mask


# --- backward ---


def _smooth(hmm: Composition, lattice: Lattice, seed: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return posteriors [n, K], and weights y_t [n, K] with p(z_t−1, z_t | x) = f_t−1 A y_t, where seed [B] is not 0.

    Weights that are too large belong to states that the past excludes: they are zero.
    """
    posteriors, weights = list[Tensor](), list[Tensor]()
    most = TOLERANCE[hmm.dtype] / (2 * hmm.states * FLOOR[hmm.dtype])
    for t in reversed(range(len(lattice.supports))):
        filtered, support = lattice.filtered[t], lattice.supports[t]
        message, counted = torch.ones_like(filtered), (seed[: len(filtered)] != 0)[:, None]
        if weights:
            rows = len(weights[-1])
            source = first_rows(support, rows)
            arrived = hmm.transition.backward_step(PROBABILITY, weights[-1], source, lattice.supports[t + 1])
            message = torch.cat([arrived, message[rows:]])
        weight = (lattice.scores[t] / lattice.scales[t][:, None]) * message  # the other order overflows
        weights.append(weight.where((weight <= most) & counted, 0.0))
        posteriors.append((filtered * message).where(counted, 0.0))
    return posteriors[::-1], weights[::-1]


def _log_smooth(hmm: Composition, lattice: Lattice, seed: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return what `_smooth` does for a lattice in log space: posteriors, and the logarithms of the weights."""
    posteriors, weights = list[Tensor](), list[Tensor]()
    steps = zip(lattice.filtered, messages_back(hmm, lattice), lattice.scores, lattice.scales, strict=True)
    for filtered, message, scores, scale in steps:
        counted = (seed[: len(filtered)] != 0)[:, None]
        posteriors.append((filtered + message).exp().where(counted, 0.0))
        weights.append((scores + message - finite(scale)[:, None]).where(counted, NEG_INF))
    return posteriors, weights


def _count(
    hmm: Composition, lattice: Lattice, ring: Semiring, seed: Tensor, smoothed: tuple[list[Tensor], list[Tensor]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gradients of the entry [B, K] and, by name, of the tensors of transition and emission, times seed [B].

    Args:
        smoothed: of `_smooth`.
    """
    (posteriors, weights), filtered, supports = smoothed, lattice.filtered, lattice.supports
    totals = {name: torch.zeros_like(value) for name, value in hmm.parameters().items() if name != "log_start"}

    def add(role: str, found: dict[str, Tensor]) -> None:
        for name, value in found.items():
            totals[f"{role}.{name}"] += value

    sizes = list(enumerate(map(len, weights)))[1:]
    before = [(t, n, filtered[t - 1][:n], first_rows(supports[t - 1], n)) for t, n in sizes]
    after = [(t, n, weights[t], supports[t]) for t, n in sizes]
    for (row, _, x, source), (_, _, y, target) in zip(*stack_together(before, after), strict=True):
        apart = ring is LOG or source is not None or target is not None
        for piece in torch.arange(len(x), device=x.device).split(
            max(1, _CELLS // (x.shape[1] * y.shape[1])) if apart else len(x)
        ):
            own, other = some_rows(source, piece), some_rows(target, piece)
            add("transition", hmm.transition.gradient(ring, x[piece], y[piece], seed[row[piece]], own, other))
    shares = [
        (t, len(share), share, support) for t, (share, support) in enumerate(zip(posteriors, supports, strict=True))
    ]
    for row, t, share, support in stack_steps(shares):
        tokens = lattice.batch.tokens[row, t]
        known = (tokens >= 0).nonzero()[:, 0]
        share = (share * seed[row, None])[known]
        add("emission", hmm.emission.gradient(tokens[known], share, some_rows(support, known)))
    return posteriors[0] * seed[:, None], totals
