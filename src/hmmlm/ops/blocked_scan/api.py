"""Log-likelihood of a blocked HMM as a differentiable function, with a closed-form gradient, on a GPU."""

from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.ops.blocked_scan.problem import (
    ENTRY,
    LIMITS,
    BlockedForward,
    BlockedProblem,
    Factors,
    NextWords,
    lay_out,
    one_step_problem,
)
from hmmlm.ops.common import NEG_INF, Carry, Scan, kernel_refusal, log_normalize
from hmmlm.ops.common import product_dtype as resolve_dtype


def refusal(device: torch.device, dtype: torch.dtype) -> str:
    """Return why `blocked_scan` does not serve parameters of a dtype on a device; empty if it does."""
    return kernel_refusal(device) or ("does not support float64" if dtype == torch.float64 else "")


def blocked_scan(
    factors: Factors,
    tokens: Tensor,
    *,
    entry: Tensor | None = None,
    lengths: Tensor | None = None,
    restart: Tensor | None = None,
    next_words: Tensor | None = None,
    product_dtype: torch.dtype | None = None,
    exact_carry: bool = False,
) -> Scan:
    """Compute log p(x) [B], differentiable in the factors and in `entry`; nothing is checked.

    The carry is over the k states of the last word's block; the caller adds the states. To give the columns of the
    transition a bias, append a column of ones to u and a column of biases to w.

    Args:
        tokens: [B, T]. Missing words (−1) are not supported.
        entry: [B, 1, k] log p(z_0 | all words before the window) over the states of the first word's block, in place of
            the start distribution where that word does not restart. With `next_words` [B, 1 + S, k]: also over those
            of the blocks of the words in its place.
        lengths: [B]; words beyond are ignored.
        restart: [B, T] bool; the word starts from log_start regardless of the preceding words, and the log-likelihood
            is the sum over the segments.
        next_words: [B, T, S] words in place of those of `tokens`, such as a teacher's samples. `next_word_score` [B] of
            the result is then the mean over S of Σ_t log p(next_words[b, t] | tokens[b, :t]), differentiable; a word
            whose probability underflows counts as 0.
        exact_carry: also report sequences of which a state of the carry underflows.

    An impossible sequence has log-likelihood −inf and no gradient. A sequence for which underflow in scaled arithmetic
    may matter (see `Limits`) is reported as `suspect`, with −inf, no gradient and a carry of zeros.
    """
    dtype = resolve_dtype(factors.u, product_dtype)
    problem = lay_out(factors, tokens, None if entry is None else entry[:, 0], lengths, restart, dtype)
    words = None
    if next_words is not None:
        before = None if entry is None else entry[:, 1:].detach()
        words = NextWords(next_words, factors.block_of_word[next_words.clamp_min(0)], before)
    log_likelihood, carry, suspect, score = _BlockedScan.apply(problem, words, exact_carry, *factors[1:], entry)
    return Scan(log_likelihood, Carry(carry), suspect, None if next_words is None else score)


def log_carry(problem: BlockedProblem, result: BlockedForward) -> tuple[Tensor, Tensor]:
    """Return log p(z | all words) [B, k] of the last words in float64, and whether a state of it may be missing [B].

    The last step is taken in log space, so that no emission underflows.
    """
    last = (problem.lengths - 1).clamp_min(0)[:, None]
    source, block, word = (x.gather(1, last) for x in (problem.source, problem.block, problem.word))
    reached = result.predicted.gather(1, last[:, :, None].expand(-1, 1, problem.w.shape[1]))[:, 0]
    emission, begins = problem.log_emission[word[:, 0].clamp_min(0)], source < 0
    begun = torch.where(source == ENTRY, problem.entry, problem.log_start[block[:, 0].clamp_min(0)])
    joint = torch.where(begins, begun, reached.log()) + emission
    suspect = (reached < LIMITS.sure) & ~begins & (emission > NEG_INF)
    return log_normalize(joint.double()).masked_fill(problem.lengths[:, None] == 0, NEG_INF), suspect.any(1)


class _BlockedScan(torch.autograd.Function):
    """Autograd function of `blocked_scan`: its gradient is the expected counts, propagated from tiles to factors."""

    @staticmethod
    def forward(
        ctx: Any, problem: BlockedProblem, words: NextWords | None, exact_carry: bool, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        from hmmlm.ops.blocked_scan import triton as kernels  # only where Triton is

        result = kernels.forward(problem)
        carry, suspect = log_carry(problem, result)
        if exact_carry:
            result = result._replace(suspect=result.suspect | suspect)
        carry = carry.masked_fill(result.suspect[:, None], NEG_INF)
        score = torch.zeros_like(result.log_likelihood)
        of_words: tuple[Tensor | None, ...] = ()
        if words is not None:
            steps = one_step_problem(problem, result.filtered, words)
            scored = kernels.forward(steps)
            of_word = scored.log_likelihood.masked_fill(scored.suspect, 0.0)
            score, of_words = of_word.view(words.word.shape).mean(2).sum(1), (*steps, *scored)
        ctx.given = [x if x is None else (x.dtype, x.shape) for x in given]
        ctx.words = None if words is None else words.word.shape
        ctx.save_for_backward(*problem, *result, *of_words)
        ctx.mark_non_differentiable(carry, result.suspect)
        return result.log_likelihood.masked_fill(result.suspect, NEG_INF), carry, result.suspect, score

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from hmmlm.ops.blocked_scan import triton as kernels

        saved, size = iter(ctx.saved_tensors), len(BlockedProblem._fields)
        problem, result = (
            BlockedProblem(*islice(saved, size)),
            BlockedForward(*islice(saved, len(BlockedForward._fields))),
        )
        if ctx.words is None:
            out = kernels.backward(problem, result, grads[0])
            layout = [*out[:5], out.entry[:, None]]
        else:
            steps, scored = BlockedProblem(*islice(saved, size)), BlockedForward(*saved)
            layout = _backward_with_words(problem, result, steps, scored, ctx.words, grads[0], grads[3])
        shaped = (None if x is None else g.reshape(x[1]).to(x[0]) for g, x in zip(layout, ctx.given, strict=True))
        return None, None, None, *shaped


def _backward_with_words(
    problem: BlockedProblem,
    result: BlockedForward,
    steps: BlockedProblem,
    scored: BlockedForward,
    shape: torch.Size,
    grad: Tensor,
    grad_score: Tensor,
) -> list[Tensor]:
    """Compute the gradients of factors and entry from the log-likelihoods and the words in their place.

    log p(x' | x_<t) = log Σ_i f_i b_i of the filtered distribution f before t, b_i = Σ_j A_ij p(x' | j). A word thus
    adds f_i b_i / Σ f b − f_i to the expected count of state i at t − 1, which the backward pass carries further back.
    """
    from hmmlm.ops.blocked_scan import triton as kernels

    each = (grad_score / shape[2])[:, None, None].expand(shape).reshape(-1)
    own = kernels.backward(steps, scored, each)
    ahead = torch.where((steps.source >= 0) & ~scored.suspect[:, None], own.initial, 0.0)
    weighted = steps.initial * ahead
    change = weighted - steps.initial * weighted.sum(1, keepdim=True)
    extra = torch.zeros_like(result.filtered)
    extra[:, :-1] = change.view(*shape, -1).sum(2)
    out = kernels.backward(problem, result, grad, extra)
    entry = torch.cat([out.entry[:, None], own.entry.view(*shape, -1)[:, 0]], 1)
    return [*(a + b for a, b in zip(out[:5], own[:5], strict=True)), entry]
