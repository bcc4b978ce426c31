"""The likelihood of any HMM as a differentiable function: scaled probabilities over the steps of its transition.

The gradient is the expected counts, in bulk: of a transition the derivative of Σ_n x_n A y_n, with x the filtered
distributions and y the scaled messages. Sequences that underflow may have changed are computed again in log space and
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence

from hmmlm.emissions import Blocked
from hmmlm.hmm.composition import Composition
from hmmlm.hmm.lattice import Lattice, SortedBatch, endings, stack_steps
from hmmlm.hmm.recursions import forward, last_filtered, messages_back, observe, predict_first, sort_batch
from hmmlm.hmm.steps import Steps, add_step, between, steps_of
from hmmlm.hmm.union_scan import Segments
from hmmlm.numerics.semirings import BOOLEAN, LOG, PROBABILITY
from hmmlm.numerics.support import BlockSupport, Support, first_rows, some_rows, spread
from hmmlm.ops.common import (
    NEG_INF,
    Carry,
    Scan,
    capturing,
    finite,
    last_tokens,
    log_normalize,
    logsumexp,
    without_autocast,
)
from hmmlm.ops.underflow import FLOOR, LIFT, TOLERANCE, flush
from hmmlm.transitions.tiled import TiledTransition


def generic_scan(
    hmm: Composition,
    tokens: Tensor,
    lengths: Tensor | None = None,
    carry: Carry | None = None,
    restart: Tensor | None = None,
    *,
    entry: Tensor | None = None,
    next_words: Tensor | None = None,
    exact_carry: bool = False,
    in_log_space: bool = False,
) -> Scan:
    """Compute log p(x) [B] and the carry; see `HMM.scan`. A stretch between two restarts is a sequence of its own.

    Args:
        entry: [B, 1, K] log p(z_1 | past) over the states of the first tokens, in place of a carry, differentiable;
            with `next_words` [B, 1 + S, K]: also over the states of the words in their place.
        next_words: [B, T, S] words in place of those of `tokens`, such as a teacher's samples, of an HMM with blocks.
            `next_word_score` [B] is then the mean over S of Σ_t log p(next_words[b, t] | tokens[b, :t]), where a word
            whose probability underflows counts as 0; differentiable.
        exact_carry: also compute sequences of which a state of the carry underflows again.
        in_log_space: compute everything in log space.
    """
    if hmm.requires_grad and any(bool(value.isnan().any()) for value in hmm.parameters().values()):
        return _broken(hmm, len(tokens))
    with without_autocast(tokens):
        cut = Segments.of(tokens, lengths, restart)
        batch = sort_batch(hmm, cut.tokens, cut.lengths)
        support, row = hmm.emission.score(batch.tokens[:, 0], batch.missing[0])[0], cut.row[batch.order]
        continued = None if entry is None else entry[row]
        if carry is not None:
            log_probs, source = over_support(hmm, carry)
            source = some_rows(source, row)
            continued = hmm.transition.forward_step(LOG, log_probs[row].to(hmm.dtype), source, support)[:, None]
        words, supports = None, [support]
        if next_words is not None:
            words = cut.take(next_words)[batch.order]
            supports += [hmm.emission.score(word, missing=False)[0] for word in words[:, 0].unbind(1)]
        first = torch.stack([predict_first(hmm, batch, each, None) for each in supports], 1)
        if continued is not None:
            again = None if cut.restart is None else cut.restart[batch.order, :1, None]
            first = continued if again is None else torch.where(again, first, continued)
        learns = torch.is_grad_enabled() and (hmm.requires_grad or first.requires_grad)
        problem = _Problem(hmm.detach(), batch, words, exact_carry, in_log_space, learns)
        names, parameters = zip(*hmm.parameters().items(), strict=True)
        log_likelihood, score, last = _GenericScan.apply(problem, names, first[:, 0], *parameters)
        total = cut.add_up(batch.unsort(log_likelihood)).to(hmm.dtype)
        total = torch.where(total.detach() == NEG_INF, NEG_INF, total)  # impossible: no gradient of other segments
        scan = Scan(total, Carry(batch.unsort(last)[cut.last], _last_states(hmm, batch, cut)))
        if words is None:
            return scan
        emitted = torch.stack([hmm.emission.score(word, missing=False)[1] for word in words[:, 0].unbind(1)], 1)
        score = score + _known(logsumexp(first[:, 1:] + emitted, 2)).mean(1)
        return scan._replace(next_word_score=cut.add_up(batch.unsort(score)))


def _broken(hmm: Composition, rows: int) -> Scan:
    """Return NaN, which training detects, for parameters with a NaN."""
    width = hmm.emission.width if isinstance(hmm.emission, Blocked) else hmm.states
    carry = torch.full((rows, width), math.nan, dtype=torch.float64, device=hmm.device)
    return Scan((hmm.log_start.sum() * math.nan).expand(rows), Carry(carry))


def compute_again(
    result: Scan,
    make: Callable[[], Composition],
    tokens: Tensor,
    lengths: Tensor | None,
    carry: Carry | None,
    restart: Tensor | None,
    entry: Tensor | None = None,
    exact_carry: bool = False,
) -> Scan:
    """Return a scan with its suspect sequences computed again, in float64, by `generic_scan`; not inside a CUDA graph.

    Args:
        make: returns the HMM.
    """
    if result.suspect is None or capturing(tokens):
        return result
    if not bool(result.suspect.any()):
        return result._replace(suspect=None)
    rows, log_probs = result.suspect.nonzero()[:, 0], result.carry.log_probs
    given = [None if value is None else value[rows] for value in (lengths, restart, entry)]
    before = None
    if carry is not None:
        before = Carry(carry.log_probs[rows], None if carry.states is None else carry.states[rows])
    found = generic_scan(
        make().to(torch.float64),
        tokens[rows],
        given[0],
        before,
        given[1],
        entry=None if given[2] is None else given[2][:, :1].double(),
        exact_carry=exact_carry,
    )
    if log_probs.dim() == 2:  # a carry is wanted
        log_probs = log_probs.index_copy(0, rows, found.carry.log_probs)
    log_likelihood = result.log_likelihood.index_copy(0, rows, found.log_likelihood.to(result.log_likelihood.dtype))
    return result._replace(log_likelihood=log_likelihood, carry=Carry(log_probs, result.carry.states), suspect=None)


# --- carries ---


def over_support(hmm: Composition, carry: Carry) -> tuple[Tensor, Support]:
    """Return the log-probabilities [B, K] of a carry, and their support."""
    if carry.states is not None and isinstance(hmm.emission, Blocked):
        width = hmm.emission.width
        if carry.states.shape[1] == width:  # of a single block
            return carry.log_probs, BlockSupport(carry.states[:, 0] // width, width)
    return carry.over_all(hmm.states), None


def _is_narrow(hmm: Composition, batch: SortedBatch) -> bool:
    """Return whether carries are over the states of a single block."""
    return isinstance(hmm.emission, Blocked) and not any(batch.missing)


def _last_states(hmm: Composition, batch: SortedBatch, cut: Segments) -> Tensor | None:
    """Return the states [B, k] of the carry; None: all states."""
    if not _is_narrow(hmm, batch):
        return None
    emission = hmm.emission
    assert isinstance(emission, Blocked)
    block = emission.block_of_word[last_tokens(cut.tokens, cut.lengths)[cut.last]]
    return block[:, None] * emission.width + torch.arange(emission.width, device=block.device)


def _carry(hmm: Composition, lattice: Lattice, predicted: dict[int, Tensor]) -> Tensor:
    """Return log p(z | x) [B, K] of the last tokens in float64.

    The last step is taken in log space, so that no emission underflows.

    Args:
        predicted: p(z_t | x_1..t−1) [n, K] at the steps where sequences end.
    """
    narrow, pieces = _is_narrow(hmm, lattice.batch), list[Tensor]()
    for t, ended in endings(lattice.batch):
        scores = hmm.emission.score(lattice.batch.tokens[ended, t], lattice.batch.missing[t])[1]
        joint = log_normalize((predicted[t][ended].log() + scores).double())
        support = some_rows(lattice.supports[t], ended)
        pieces.append(joint if narrow else spread(joint, support, hmm.states, NEG_INF))
    return torch.cat(pieces[::-1])


class _Problem(NamedTuple):
    """What a scan computes, and how."""

    hmm: Composition  # detached
    batch: SortedBatch
    words: Tensor | None  # [B, T, S] to be scored in place of tokens, rows as in the batch
    exact_carry: bool
    in_log_space: bool
    learns: bool


class _Words(NamedTuple):
    """The words in place of tokens after the first, N of them: time-major, as the rows of the batch."""

    steps: Steps
    before: Tensor  # [N, K] filtered distributions
    source: Support
    word: Tensor  # [N]
    support: Support
    predicted: Tensor  # [N, K]
    weight: Tensor  # [N, K] of a state: p(word | z) / p(word | past)
    log_probs: Tensor  # [N] log p(word | past); 0 where it underflows


class _Run(NamedTuple):
    """The forward recursion, and its exact form for the sequences that underflow may have changed."""

    lattice: Lattice  # probabilities; without steps if everything is computed in log space
    steps: Steps
    total: Tensor  # [B] log p(x) in float64
    last: Tensor  # [B, K] carry
    words: _Words | None
    rows: Tensor  # [m] sequences that underflow may have changed
    exact: Lattice | None  # of these, in log space and float64, longest first
    model: Composition  # in float64


class _GenericScan(torch.autograd.Function):
    """Autograd function of `generic_scan`: rows as in the batch."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, problem: _Problem, names: tuple[str, ...], first: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = _run(problem, first)
        if problem.learns:
            ctx.problem, ctx.names, ctx.run = problem, names, run
        total, last = run.total.clone(), run.last.clone()  # ctx must not hold a returned tensor
        ctx.mark_non_differentiable(last)
        score = torch.zeros_like(run.total)
        if run.words is not None:
            active = problem.batch.active[1:]
            means = run.words.log_probs.unflatten(0, (sum(active), -1)).mean(1)
            score = pad_sequence([score, *means.split(active)], batch_first=True).sum(0)
        return total, score.to(first.dtype), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_score: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        run, hmm = ctx.run, ctx.problem.hmm
        found = _Gradient(hmm)
        with without_autocast(grad):
            first = torch.zeros_like(run.total, dtype=hmm.dtype)[:, None]
            if run.lattice.supports:
                first = found.add_scaled(run, grad.to(hmm.dtype), grad_score)
            if run.exact is not None:
                order = run.rows[run.exact.batch.order]
                own = grad[order].to(run.model.dtype) * (run.exact.log_likelihood() > NEG_INF)
                exact = found.add_exact(run, own)
                first = (
                    exact.new_zeros(len(first), exact.shape[1]).add_(first).index_add_(0, order, exact).to(hmm.dtype)
                )
        return None, None, first, *(found.totals.get(name) for name in ctx.names)


# --- forward ---


def _run(problem: _Problem, first: Tensor) -> _Run:
    hmm, batch = problem.hmm, problem.batch
    lattice, steps, words = Lattice(batch, [], [], [], []), Steps(PROBABILITY, hmm.transition), None
    if problem.in_log_space:
        rows, model = torch.arange(len(first), device=first.device), hmm
        total, last = first.new_empty(len(first), dtype=torch.float64), first.new_empty(0)
    else:
        observed = observe(hmm, batch, None, _relative)
        steps = between(PROBABILITY, hmm.transition, [support for support, _, _ in observed])
        ending, predicted, peak = {t for t, _ in endings(batch)}, dict[int, Tensor](), finite(first.amax(1))
        begin = PROBABILITY.from_log(first - peak[:, None])
        for t, (support, scores, _) in enumerate(observed):
            reached = add_step(steps, lattice, (support, scores), begin)
            if t in ending:
                predicted[t] = reached
        logs = torch.cat(lattice.scales).double().log() + torch.cat([offset for _, _, offset in observed])
        total = lattice._replace(scales=list(logs.split(batch.active))).log_likelihood() + peak
        last = _carry(hmm, lattice, predicted)
        rows, model = _find_lost(problem, steps, lattice, first, predicted).nonzero()[:, 0], hmm
        if problem.words is not None and len(batch.active) > 1:
            words = _score_words(problem, lattice)
        if len(rows):
            model = hmm.to(torch.float64)
    exact = None
    if len(rows):
        exact = forward(model, _select(batch, rows), first=first[rows].to(model.dtype))
        order, found = rows[exact.batch.order], last_filtered(model, exact)
        if _is_narrow(hmm, batch):
            found = _narrow(model, exact, found)
        last = found[exact.batch.order.argsort()] if problem.in_log_space else last.index_copy(0, order, found)
        total = total.index_copy(0, order, exact.log_likelihood())
    return _Run(lattice, steps, total, last, words, rows, exact, model)


def _relative(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return emission probabilities relative to the largest of their row, times LIFT, and the log of what that is."""
    lift, largest = LIFT[scores.dtype], finite(scores.amax(1))
    root = (0.5 * (scores - largest[:, None])).exp_()  # of a probability that may be below all numbers
    return flush(root * (root * lift)), largest.double() - math.log(lift)


def _score_words(problem: _Problem, lattice: Lattice) -> _Words:
    """Score the words in place of tokens; all steps at once."""
    hmm, words = problem.hmm, problem.words
    assert words is not None and isinstance(hmm.transition, TiledTransition)
    count, active = words.shape[2], lattice.batch.active[1:]
    before = torch.cat([values[:rows] for values, rows in zip(lattice.filtered, active, strict=False)])
    blocks = [first_rows(own, rows) for own, rows in zip(lattice.supports, active, strict=False)]
    source = BlockSupport(torch.cat([own.blocks for own in blocks]), before.shape[1])  # type: ignore[union-attr]
    before, source = before.repeat_interleave(count, 0), source.rows(_repeated(len(before), count, before.device))
    word = torch.cat([words[:rows, t].flatten() for t, rows in enumerate(active, 1)])
    support, scores = hmm.emission.score(word, missing=False)
    scores, offset = _relative(scores)
    assert isinstance(support, BlockSupport)
    steps = steps_of(hmm.transition, [(source.blocks, support.blocks)], support.width)
    predicted = steps.forward(1, before, source, support)
    mass = (predicted * scores).sum(1)
    certain = mass >= FLOOR[mass.dtype]
    weight = torch.where(certain[:, None], scores / mass[:, None], 0.0)
    log_probs = torch.where(certain, mass.log() + offset, 0.0)
    return _Words(steps, before, source, word, support, predicted, weight, log_probs)


def _repeated(rows: int, count: int, device: torch.device) -> Tensor:
    """Return 0, …, rows − 1, each `count` times."""
    return torch.arange(rows, device=device).repeat_interleave(count)


def _known(log_probs: Tensor) -> Tensor:
    """Return log-probabilities with 0 for −inf."""
    return log_probs.masked_fill(log_probs.detach() == NEG_INF, 0.0)


def _narrow(hmm: Composition, lattice: Lattice, log_probs: Tensor) -> Tensor:
    """Restrict values [m, Z] of the last tokens to their blocks [m, k]."""
    supports = [some_rows(lattice.supports[t], ended) for t, ended in endings(lattice.batch)]
    return BlockSupport(torch.cat([each.blocks for each in supports[::-1]]), hmm.emission.width).restrict(log_probs)  # type: ignore[union-attr, attr-defined]


def _select(batch: SortedBatch, rows: Tensor) -> SortedBatch:
    """Return some rows of a batch, which are in its order."""
    lengths = torch.tensor(batch.active, device=rows.device)
    active = [int((rows < n).sum()) for n in lengths]
    count = sum(n > 0 for n in active)  # missing tokens as in the batch: supports stay the same
    return SortedBatch(
        batch.tokens[rows], active[:count], batch.missing[:count], torch.arange(len(rows), device=rows.device)
    )


def _find_lost(
    problem: _Problem, steps: Steps, lattice: Lattice, first: Tensor, predicted: dict[int, Tensor]
) -> Tensor:
    """Return a mask [B] of the sequences that underflow may have changed by more than TOLERANCE."""
    hmm, batch, dtype = problem.hmm, lattice.batch, problem.hmm.dtype
    least = torch.stack([values.amin() for values in lattice.filtered]).amin()
    scale = torch.stack([values.amin() for values in lattice.scales]).amin()
    loss = 2 * hmm.states * FLOOR[dtype] * LIFT[dtype]
    if bool(least * TOLERANCE[dtype] * scale >= loss) and bool(first.amin() > math.log(FLOOR[dtype])):
        return torch.zeros(len(first), dtype=torch.bool, device=first.device)  # every value is accurate
    ends = predicted if problem.exact_carry else {}
    mask = _lose(steps, lattice, ends, None)
    if bool(mask.any()):
        reachable, possible = Lattice(batch, [], [], [], []), Steps(BOOLEAN, hmm.transition)
        for support, scores in observe(hmm, batch, None, lambda scores: (BOOLEAN.from_log(scores),)):
            add_step(possible, reachable, (support, scores), BOOLEAN.from_log(first))
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
    mask, lost, ends = (
        torch.zeros(len(lattice.filtered[0]), dtype=torch.bool, device=device),
        None,
        endings(lattice.batch),
    )
    ending = {t: ended for t, ended in ends if t in predicted}
    for t, (filtered, scores, scale) in enumerate(zip(lattice.filtered, lattice.scores, lattice.scales, strict=True)):
        rows, support, total = len(filtered), lattice.supports[t], scale.clamp_min(torch.finfo(dtype).tiny)[:, None]
        moved = torch.zeros_like(filtered)
        if lost is not None:
            moved = steps.forward(t, lost[:rows], first_rows(lattice.supports[t - 1], rows), support)
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


# --- backward ---


class _Gradient:
    """Sums of the gradients of the tensors of an HMM, by name."""

    def __init__(self, hmm: Composition) -> None:
        self.hmm = hmm
        self.totals = {name: torch.zeros_like(value) for name, value in hmm.parameters().items() if name != "log_start"}

    def _add(self, role: str, found: dict[str, Tensor]) -> None:
        for name, value in found.items():
            self.totals[f"{role}.{name}"] += value.to(self.hmm.dtype)

    def add_scaled(self, run: _Run, seed: Tensor, seed_score: Tensor) -> Tensor:
        """Add those of log-likelihoods and of words' scores, times seeds [B]; return those of the first step [B, K]."""
        seed = torch.where(run.total == NEG_INF, 0.0, seed)
        seed = seed if run.exact is None else seed.index_fill(0, run.rows, 0.0)
        size, change = seed.abs(), None
        if run.words is not None:
            change, size = self._add_words(run, run.words, seed_score), size + seed_score.abs().to(size)
        posteriors, weights = _smooth(self.hmm, run, seed, size, change)
        self._add_counts(self.hmm, run.lattice, run.steps, posteriors, weights, torch.ones_like(seed))
        return posteriors[0]

    def add_exact(self, run: _Run, seed: Tensor) -> Tensor:
        """Add those of sequences in log space, times seed [m]; return those of the first step [m, K]."""
        assert run.exact is not None
        lattice, posteriors, weights = run.exact, list[Tensor](), list[Tensor]()
        steps = zip(lattice.filtered, messages_back(run.model, lattice), lattice.scores, lattice.scales, strict=True)
        for filtered, message, scores, scale in steps:
            counted = (seed[: len(filtered)] != 0)[:, None]
            posteriors.append((filtered + message).exp().where(counted, 0.0) * seed[: len(filtered), None])
            weights.append((scores + message - finite(scale)[:, None]).where(counted, NEG_INF))
        self._add_counts(run.model, lattice, Steps(LOG, run.model.transition), posteriors, weights, seed)
        return posteriors[0]

    def _add_counts(
        self,
        hmm: Composition,
        lattice: Lattice,
        steps: Steps,
        posteriors: list[Tensor],
        weights: list[Tensor],
        seed: Tensor,
    ) -> None:
        """Add expected counts from posteriors [n, K], and weights y_t [n, K] with p(z_t−1, z_t | x) = f_t−1 A y_t."""
        filtered, supports = lattice.filtered, lattice.supports
        sizes = list(enumerate(map(len, weights)))[1:]
        before = [(t, n, filtered[t - 1][:n], first_rows(supports[t - 1], n)) for t, n in sizes]
        after = [(t, n, weights[t], supports[t]) for t, n in sizes]
        self._add("transition", steps.gradient(before, after, seed))
        shares = [(t, len(p), p, support) for t, (p, support) in enumerate(zip(posteriors, supports, strict=True))]
        for row, t, share, support in stack_steps(shares):
            tokens = lattice.batch.tokens[row, t]
            known = (tokens >= 0).nonzero()[:, 0]
            self._add("emission", hmm.emission.gradient(tokens[known], share[known], some_rows(support, known)))

    def _add_words(self, run: _Run, words: _Words, seed: Tensor) -> list[Tensor]:
        """Add the gradients of words' scores, times seed [B]; return those of the states before [n, K] for each step.

        log p(word | past) = log Σ_i f_i b_i of the filtered distribution f, b_i = Σ_j A_ij p(word | j). A word adds
        f_i b_i / Σ f b − f_i to the expected count of state i, which the backward pass carries further back.
        """
        active = run.lattice.batch.active[1:]
        count = len(words.word) // sum(active)
        given = torch.cat([seed[:rows] for rows in active]).repeat_interleave(count) / count
        weight = words.weight * given.to(words.weight)[:, None]
        before = [(1, len(weight), words.before, words.source)]
        ones = torch.ones_like(given, dtype=weight.dtype)
        self._add("transition", words.steps.gradient(before, [(1, len(weight), weight, words.support)], ones))
        self._add("emission", self.hmm.emission.gradient(words.word, words.predicted * weight, words.support))
        ahead = words.steps.backward(1, weight, words.source, words.support)
        change = ahead - (ahead * words.before).sum(1, keepdim=True)
        return list(change.unflatten(0, (-1, count)).sum(1).split(active))


def _smooth(
    hmm: Composition, run: _Run, seed: Tensor, size: Tensor, change: list[Tensor] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return posteriors [n, K], and weights y_t [n, K] with p(z_t−1, z_t | x) = f_t−1 A y_t, both times seed [B].

    A weight is a posterior divided by a prediction, which is sure where it matters (see `_lose`). Weights that are too
    large for that belong to states that the past excludes: they are zero.

    Args:
        size: [B] of what is added up.
        change: added to the messages, times the seed, of each step but the last.
    """
    lattice, posteriors, weights = run.lattice, list[Tensor](), list[Tensor]()
    most = 2 * TOLERANCE[hmm.dtype] / FLOOR[hmm.dtype] * size
    for t in reversed(range(len(lattice.supports))):
        filtered, support = lattice.filtered[t], lattice.supports[t]
        message = seed[: len(filtered), None].expand_as(filtered)
        if weights:
            rows = len(weights[-1])
            arrived = run.steps.backward(t + 1, weights[-1], first_rows(support, rows), lattice.supports[t + 1])
            if change is not None:
                arrived = arrived + change[t]
            message = arrived if rows == len(message) else torch.cat([arrived, message[rows:]])
        weight = (lattice.scores[t] / lattice.scales[t][:, None]) * message  # the other order overflows
        least = most[: len(weight), None]
        weights.append(weight.where((weight.abs() <= least) & (least > 0), 0.0))
        posteriors.append((filtered * message).where(least > 0, 0.0))
    return posteriors[::-1], weights[::-1]
