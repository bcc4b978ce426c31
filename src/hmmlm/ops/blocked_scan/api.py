"""Log-likelihood of a blocked HMM as a differentiable function, with a closed-form gradient."""

from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.errors import InputError
from hmmlm.ops.blocked_scan import naive
from hmmlm.ops.blocked_scan.problem import (
    BlockedForward,
    CarriedRows,
    Factors,
    Gradients,
    NextWords,
    Problem,
    lay_out,
    one_step_problem,
)
from hmmlm.ops.common import NEG_INF, Carry, Impl, Scan, capturing, choose_kernels
from hmmlm.ops.common import product_dtype as resolve_dtype


def blocked_scan(
    factors: Factors,
    tokens: Tensor,
    *,
    carried: CarriedRows | None = None,
    lengths: Tensor | None = None,
    restart: Tensor | None = None,
    next_words: Tensor | None = None,
    product_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> Scan:
    """Compute log p(x) [B], differentiable in the factors and in `carried`.

    The carry holds probabilities [B, k] over the states of the last word's block; the caller adds the states. To give
    the columns of the transition a bias, append a column of ones to u and a column of biases to w.

    Args:
        tokens: [B, T]. Missing words (−1) are not supported here: the queries of the blocked HMM handle them.
        carried: the carry that precedes the first word, used where that word does not restart.
        lengths: [B]; words beyond are ignored.
        restart: [B, T] bool; the word starts from log_start regardless of the preceding words, and the log-likelihood
            is the sum over the segments.
        next_words: [B, T, S] words in place of those of `tokens`, such as a teacher's samples. `next_word_score` [B] of
            the result is then the mean over S of Σ_t log p(next_words[b, t] | tokens[b, :t]), differentiable; a word
            whose probability underflows counts as 0.

    An impossible sequence has log-likelihood −inf and no gradient. A sequence for which underflow in scaled arithmetic
    may matter (see `Limits`) is recomputed in log space in float64. During CUDA graph capture, where the device must
    not be synchronized, it is returned as `suspect` instead, with −inf, no gradient and a carry of zeros.
    """
    check(factors, tokens, carried, lengths, restart)
    if impl == "naive":
        return naive.blocked_scan(factors, tokens, carried, lengths, restart, next_words)
    dtype = resolve_dtype(factors.u, product_dtype)
    unsupported = "float64" if dtype == torch.float64 else ""
    chosen = choose_kernels("blocked_scan", impl, factors.u, "scaled", unsupported)
    problem = lay_out(factors, tokens, carried, lengths, restart, dtype)
    given = (*factors[1:], *(carried or (None, None, None))[:3])
    words = None if next_words is None else NextWords(next_words, factors.block_of_word[next_words.clamp_min(0)])
    log_likelihood, final, suspect, score = _BlockedScan.apply(chosen, problem, words, *given)
    score = None if next_words is None else score
    scan = Scan(log_likelihood, Carry(final), suspect, score)
    if capturing(factors.u) or not suspect.any():
        return scan
    return recompute_suspects(scan, factors, tokens, carried, lengths, restart)


def recompute_suspects(
    scan: Scan,
    factors: Factors,
    tokens: Tensor,
    carried: CarriedRows | None,
    lengths: Tensor | None,
    restart: Tensor | None,
) -> Scan:
    """Return the scan with its suspect sequences recomputed in log space in float64."""
    assert scan.suspect is not None
    again = scan.suspect.nonzero()[:, 0]
    result = naive.blocked_scan(
        factors.to(torch.float64),
        tokens[again],
        None if carried is None else carried.rows(again, torch.float64),
        None if lengths is None else lengths[again],
        None if restart is None else restart[again],
    )
    return scan._replace(
        log_likelihood=scan.log_likelihood.index_put((again,), result.log_likelihood.to(scan.log_likelihood.dtype)),
        carry=Carry(scan.carry.probs.index_put((again,), result.carry.probs.to(scan.carry.probs.dtype))),
        suspect=torch.zeros_like(scan.suspect),
    )


class _BlockedScan(torch.autograd.Function):
    """Autograd function of `blocked_scan`: its gradient is the expected counts, propagated from tiles to factors."""

    @staticmethod
    def forward(
        ctx: Any, kernels: ModuleType, problem: Problem, words: NextWords | None, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        result: BlockedForward = kernels.forward(problem)
        kept = problem.w.shape[1]
        last = problem.lengths[:, None, None].expand(-1, 1, kept)
        final = result.filtered[:, :, :kept].gather(1, last)[:, 0]
        known = (problem.lengths > 0) & ~result.suspect
        final = torch.where(known[:, None], final, 0.0)
        score = torch.zeros_like(result.log_likelihood)
        of_words: tuple[Tensor | None, ...] = ()
        if words is not None:
            steps = one_step_problem(problem, result.filtered, words)
            scored = kernels.forward(steps)
            of_word = scored.log_likelihood.masked_fill(scored.suspect, 0.0)
            score, of_words = of_word.view(words.word.shape).mean(2).sum(1), (*steps, *scored)
        ctx.kernels, ctx.given = kernels, [x if x is None else (x.dtype, x.shape) for x in given]
        ctx.words = None if words is None else words.word.shape
        ctx.save_for_backward(*problem, *result, *of_words)
        ctx.mark_non_differentiable(final, result.suspect)
        return result.log_likelihood.masked_fill(result.suspect, NEG_INF), final, result.suspect, score

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, size = iter(ctx.saved_tensors), len(Problem._fields)
        problem, result = Problem(*islice(saved, size)), BlockedForward(*islice(saved, len(BlockedForward._fields)))
        if ctx.words is None:
            out = ctx.kernels.backward(problem, result, grads[0])
        else:
            steps, scored = Problem(*islice(saved, size)), BlockedForward(*saved)
            out = _backward_with_words(ctx.kernels, problem, result, steps, scored, ctx.words, grads[0], grads[3])
        blocks, kept = problem.w.shape[:2]
        own_u, own_normalizer = out.u[:blocks, :kept], out.log_normalizer[:blocks, :kept]
        layout = [own_u, out.w, own_normalizer, out.log_start, out.log_emission, None, None, None]
        if ctx.given[-1] is not None:
            then = ctx.given[-1][1][1]
            is_carried = problem.source[:, :1] >= blocks
            initial = torch.where(is_carried, out.initial[:, :then], 0.0)
            layout[5:] = [initial, out.u[blocks:, :then], out.log_normalizer[blocks:, :then]]
        shaped = (
            g if g is None or x is None else g.reshape(x[1]).to(x[0]) for g, x in zip(layout, ctx.given, strict=True)
        )
        return None, None, None, *shaped


def _backward_with_words(
    kernels: ModuleType,
    problem: Problem,
    result: BlockedForward,
    steps: Problem,
    scored: BlockedForward,
    shape: torch.Size,
    grad: Tensor,
    grad_score: Tensor,
) -> Gradients:
    """Compute the gradients of the log-likelihoods and of the words in their place.

    log p(x' | x_<t) = log Σ_i f_i b_i of the filtered distribution f before t, b_i = Σ_j A_ij p(x' | j). A word thus
    adds f_i b_i / Σ f b − f_i to the expected count of state i at t − 1, which the backward pass carries further back.
    """
    each = (grad_score / shape[2])[:, None, None].expand(shape).reshape(-1)
    own: Gradients = kernels.backward(steps, scored, each)
    ahead = torch.where((steps.source >= 0) & ~scored.suspect[:, None], own.initial, 0.0)
    weighted = steps.initial * ahead
    change = weighted - steps.initial * weighted.sum(1, keepdim=True)
    extra = torch.zeros_like(result.filtered)
    extra[:, :-1] = change.view(*shape, -1).sum(2)
    out: Gradients = kernels.backward(problem, result, grad, extra)
    own = own._replace(initial=ahead.view(*shape, -1)[:, 0].sum(1))
    return Gradients(*(a + b for a, b in zip(out, own, strict=True)))


def check(
    factors: Factors, tokens: Tensor, carried: CarriedRows | None, lengths: Tensor | None, restart: Tensor | None
) -> None:
    """Raise an InputError that names the input with a wrong shape or value; values only outside a CUDA graph."""
    _check_shapes(factors, tokens, carried, restart)
    if not capturing(factors.u):
        _check_words(tokens, lengths, factors.log_emission.shape[0])


def _check_shapes(factors: Factors, tokens: Tensor, carried: CarriedRows | None, restart: Tensor | None) -> None:
    """Raise an InputError that names the tensor with a wrong shape; does not synchronize with the device."""
    if tokens.dim() != 2 or not tokens.numel():
        raise InputError(f"blocked_scan: tokens {list(tokens.shape)} must be [B, T] with at least one word")
    states, h = factors.u.shape
    words, kept = factors.log_emission.shape
    if states % kept:
        raise InputError(f"blocked_scan: {states} states are not blocks of {kept}, the width of log_emission")
    expected = {
        "w": (factors.w, (states, h)),
        "log_normalizer": (factors.log_normalizer, (states,)),
        "log_start": (factors.log_start, (states,)),
        "block_of_word": (factors.block_of_word, (words,)),
        "restart": (restart, tuple(tokens.shape)),
    }
    if carried is not None:
        then = carried.filtered.shape[1]
        rows = len(carried.u) if carried.group is not None or len(carried.u) == 1 else tokens.shape[0]
        expected |= {
            "carried.filtered": (carried.filtered, (tokens.shape[0], then)),
            "carried.u": (carried.u, (rows, then, h)),
            "carried.log_normalizer": (carried.log_normalizer, (rows, then)),
        }
    for name, (x, shape) in expected.items():
        if x is not None and tuple(x.shape) != shape:
            raise InputError(f"blocked_scan: {name} is {list(x.shape)}, should be {list(shape)}")


def _check_words(tokens: Tensor, lengths: Tensor | None, words: int) -> None:
    """Raise an InputError for a length out of range or a token that is not a word; synchronizes with the device."""
    outside = (tokens < 0) | (tokens >= words)
    if lengths is not None:
        if ((lengths < 0) | (lengths > tokens.shape[1])).any():
            raise InputError(f"blocked_scan: lengths {lengths.tolist()} are not all within 0 and {tokens.shape[1]}")
        outside &= torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    if outside.any():
        b, t = outside.nonzero()[0].tolist()
        raise InputError(f"blocked_scan: token {int(tokens[b, t])} at [{b}, {t}] is not one of the {words} words")
