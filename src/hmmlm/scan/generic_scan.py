"""The likelihood of any HMM as a differentiable function: scaled probabilities over the steps of its transition.

The gradient is the expected counts, in bulk: of a transition the derivative of Σ_n x_n A y_n, with x the filtered
distributions and y the scaled messages. Sequences that underflow may have changed are computed again in log space and
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.emissions import Blocked
from hmmlm.numerics.semirings import LOG
from hmmlm.numerics.support import BlockSupport, Support
from hmmlm.ops.common import NEG_INF, Carry, Scan, capturing, last_tokens, logsumexp, without_autocast
from hmmlm.scan.composition import Composition, parameters_of
from hmmlm.scan.generic_filter import GenericProblem, is_narrow, run_scaled
from hmmlm.scan.generic_gradient import Gradient
from hmmlm.scan.lattice import Packed
from hmmlm.scan.recursions import predict_first, sort_batch
from hmmlm.scan.union_scan import Segments


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
            whose probability underflows counts as 0, as do all words of a sequence that underflows in float64;
            differentiable. In float32, sequences that underflow are computed again in float64.
        exact_carry: also compute sequences of which a state of the carry underflows again.
        in_log_space: compute everything in log space.
    """
    if hmm.requires_grad and any(bool(value.isnan().any()) for value in parameters_of(hmm).values()):
        return _broken(hmm, len(tokens))
    with without_autocast(tokens):
        cut = Segments.of(tokens, lengths, restart)
        batch = sort_batch(hmm, cut.tokens, cut.lengths)
        support, row = hmm.emission.score(batch.tokens[:, 0], batch.missing[0])[0], cut.row[batch.order]
        continued = None if entry is None else entry[row].to(hmm.dtype)
        if carry is not None:
            log_probs, source = over_support(hmm, carry.take(row))
            continued = hmm.transition.forward_step(LOG, log_probs.to(hmm.dtype), source, support)[:, None]
        words, supports = None, [support]
        if next_words is not None:
            words = cut.take(next_words)[batch.order]
            supports += [hmm.emission.score(word, missing=False)[0] for word in words[:, 0].unbind(1)]
        first = torch.stack([predict_first(hmm, batch, each, None) for each in supports], 1)
        if continued is not None:
            again = None if cut.restart is None else cut.restart[batch.order, :1, None]
            first = continued if again is None else torch.where(again, first, continued)
        learns = torch.is_grad_enabled() and (hmm.requires_grad or first.requires_grad)
        problem = GenericProblem(hmm.detach(), batch, words, exact_carry, in_log_space, learns)
        names, parameters = zip(*parameters_of(hmm).items(), strict=True)
        log_likelihood, score, last, suspect = _GenericScan.apply(problem, names, first[:, 0], *parameters)
        total = cut.add_up(batch.unsort(log_likelihood)).to(hmm.dtype)
        total = torch.where(total.detach() == NEG_INF, NEG_INF, total)  # impossible: no gradient of other segments
        states = None
        if is_narrow(hmm, batch):
            assert isinstance(hmm.emission, Blocked)
            states = block_states(hmm.emission, tokens, lengths)
        scan = Scan(total, Carry(batch.unsort(last)[cut.last], states))
        if words is None:
            return scan
        emitted = torch.stack([hmm.emission.score(word, missing=False)[1] for word in words[:, 0].unbind(1)], 1)
        entered = logsumexp(first[:, 1:] + emitted, 2)
        score = score + entered.masked_fill(entered.detach() == NEG_INF, 0.0).mean(1)
        scan = scan._replace(next_word_score=cut.add_up(batch.unsort(score)))
        if hmm.dtype == torch.float64 or not len(suspect):
            return scan
        scan = scan._replace(suspect=torch.zeros_like(total, dtype=torch.bool).index_fill(0, row[suspect], True))
    options: dict[str, Any] = {"entry": entry, "next_words": next_words, "exact_carry": exact_carry}
    return compute_again(scan, lambda: hmm, tokens, lengths, carry, restart, **options)


def _broken(hmm: Composition, rows: int) -> Scan:
    """Return NaN, which training detects, for parameters with a NaN."""
    width = hmm.emission.width if isinstance(hmm.emission, Blocked) else hmm.num_states
    carry = torch.full((rows, width), math.nan, dtype=torch.float64, device=hmm.device)
    return Scan((hmm.log_start.sum() * math.nan).expand(rows), Carry(carry))


def compute_again(result: Scan, make: Callable[[], Composition], *batch: Any, **options: Any) -> Scan:
    """Return a scan with its suspect sequences computed again, in float64, by `generic_scan`; not inside a CUDA graph.

    Args:
        make: returns the HMM.
        batch: of `generic_scan`, as are `options`.
    """
    if result.suspect is None or capturing(result.suspect):
        return result
    if not bool(result.suspect.any()):
        return result._replace(suspect=None)
    rows, log_probs = result.suspect.nonzero()[:, 0], result.carry.log_probs

    def take(value: Any) -> Any:
        return value.take(rows) if isinstance(value, Carry) else value[rows] if isinstance(value, Tensor) else value

    own = {name: take(value) for name, value in options.items()}
    found = generic_scan(make().to(torch.float64), *map(take, batch), **own)
    if log_probs.dim() == 2:  # a carry is wanted
        log_probs = log_probs.index_copy(0, rows, found.carry.log_probs)
    log_likelihood = result.log_likelihood.index_copy(0, rows, found.log_likelihood.to(result.log_likelihood.dtype))
    score = result.next_word_score
    if score is not None and found.next_word_score is not None:
        score = score.index_copy(0, rows, found.next_word_score.to(score.dtype))
    return Scan(log_likelihood, Carry(log_probs, result.carry.states), None, score)


# --- carries ---


def over_support(hmm: Composition, carry: Carry) -> tuple[Tensor, Support]:
    """Return the log-probabilities [B, K] of a carry, and their support."""
    if carry.states is not None and isinstance(hmm.emission, Blocked):
        width = hmm.emission.width
        if carry.states.shape[1] == width:  # of a single block
            return carry.log_probs, BlockSupport(carry.states[:, 0] // width, width)
    return carry.over_all(hmm.num_states), None


def block_states(emission: Blocked, tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """Return the states [B, k] of the blocks of the last tokens."""
    block = emission.block_of_word[last_tokens(tokens, lengths).clamp(min=0)]
    return block[:, None] * emission.width + torch.arange(emission.width, device=block.device)


class _GenericScan(torch.autograd.Function):
    """Autograd function of `generic_scan`: rows as in the batch."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, problem: GenericProblem, names: tuple[str, ...], first: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        run = run_scaled(problem, first)
        if problem.learns:
            ctx.problem, ctx.names, ctx.run = problem, names, run
        total, last, suspect = (each.clone() for each in (run.total, run.last, run.rows))  # ctx must not hold these
        ctx.mark_non_differentiable(last, suspect)
        score = torch.zeros_like(run.total)
        if run.words is not None:
            means = run.words.log_probs.unflatten(0, (len(problem.batch.before), -1)).mean(1)
            score = Packed(problem.batch, torch.cat([score, means])).padded(0.0).sum(0).index_fill(0, run.rows, 0.0)
        return total, score.to(first.dtype), last, suspect

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_score: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        run, hmm = ctx.run, ctx.problem.hmm
        found = Gradient(hmm)
        with without_autocast(grad):
            first = torch.zeros_like(run.total, dtype=hmm.dtype)[:, None]
            if run.lattice is not None:
                first = found.add_scaled(run, run.lattice, grad.to(hmm.dtype), grad_score)
            if run.exact is not None:
                order = run.rows[run.exact.batch.order]
                own = grad[order].to(run.model.dtype) * (run.exact.log_likelihood() > NEG_INF)
                exact = found.add_exact(run, own)
                first = (
                    exact.new_zeros(len(first), exact.shape[1]).add_(first).index_add_(0, order, exact).to(hmm.dtype)
                )
        return None, None, first, *(found.totals.get(name) for name in ctx.names)
