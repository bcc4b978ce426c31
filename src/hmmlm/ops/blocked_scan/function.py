"""The public function, its choice of implementation and its closed-form gradient."""

from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.ops.blocked_scan import naive
from hmmlm.ops.blocked_scan.problem import BlockedScan, Initial, Problem, State, lay_out
from hmmlm.ops.choice import kernels
from hmmlm.ops.linear_logsumexp.precision import resolve, wide

Impl = Literal["auto", "naive", "torch", "triton"]


def blocked_scan(
    tokens: Tensor,
    block_of_word: Tensor,
    u: Tensor,
    w: Tensor,
    log_normalizer: Tensor,
    log_start: Tensor,
    log_emission: Tensor,
    *,
    initial: Initial | None = None,
    lengths: Tensor | None = None,
    restart: Tensor | None = None,
    product_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> BlockedScan:
    """log p(x) [B] under an HMM whose states are in M blocks of `kept` and whose words belong to one block each.

    tokens [B, T], block_of_word [V]; u, w [M·kept, h], log_normalizer and log_start [M·kept], where state
    m·kept + i is state i of block m and log A[i, j] = u_i · w_j − log_normalizer_i (a bias of the columns is one more
    column of ones in u and of biases in w); log_emission [V, kept], row x over the states of the block of x.

    `lengths` [B]: words beyond are not looked at. `restart` [B, T] bool: that word starts from log_start whatever
    came before, and the log-likelihood is the sum over the stretches. `initial`: what the first word follows where it
    does not restart. Missing words (−1) are not for this operation: the blocked HMM's queries handle them.

    An impossible sequence has −inf and no gradient. A sequence whose mass vanishes in scaled arithmetic is `suspect`;
    here such sequences are done again in log space, and no suspect remains. Only under CUDA graph capture, where
    nothing may wait for the device, are suspects returned: −inf and no gradient, for the caller to look at.
    """
    _check(tokens, block_of_word, u, w, log_normalizer, log_start, log_emission, initial, restart)
    capturing = u.is_cuda and torch.cuda.is_current_stream_capturing()
    if not capturing:
        _check_words(tokens, lengths, log_emission.shape[0])
    if impl == "naive":
        return naive.blocked_scan(
            tokens, block_of_word, u, w, log_normalizer, log_start, log_emission, initial, lengths, restart
        )
    dtype = resolve(u, product_dtype)
    problem = lay_out(
        tokens, block_of_word, u, w, log_normalizer, log_start, log_emission, initial, lengths, restart, dtype
    )
    given = (u, w, log_normalizer, log_start, log_emission, *(initial or (None, None, None)))
    chosen = kernels("blocked_scan", impl, u, "float64" if dtype == torch.float64 else "")
    result = BlockedScan(*_BlockedScan.apply(chosen, problem, *given))
    if capturing or not result.suspect.any():
        return result
    again = result.suspect.nonzero()[:, 0]
    exact = wide(dtype)
    precisely = naive.blocked_scan(
        tokens[again], block_of_word, u.to(exact), w.to(exact), log_normalizer.to(exact), log_start.to(exact),
        log_emission.to(exact), None if initial is None else initial.of(again, exact),
        None if lengths is None else lengths[again], None if restart is None else restart[again],
    )  # fmt: skip
    return BlockedScan(
        result.log_likelihood.index_put((again,), precisely.log_likelihood),
        result.final.index_put((again,), precisely.final),
        torch.zeros_like(result.suspect),
    )


class _BlockedScan(torch.autograd.Function):
    """The gradient with respect to log-probabilities is expected counts; those of tiles go on to the factors."""

    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, problem: Problem, *given: Tensor | None) -> tuple[Tensor, ...]:
        state: State = kernels.forward(problem)
        kept = problem.w.shape[1]
        last = problem.lengths[:, None, None].expand(-1, 1, kept)
        final = state.filtered[:, :, :kept].gather(1, last)[:, 0]
        final = torch.where((problem.lengths > 0)[:, None], final, 0.0)
        ctx.kernels, ctx.given = kernels, [x if x is None else (x.dtype, x.shape) for x in given]
        ctx.save_for_backward(*problem, *state)
        ctx.mark_non_differentiable(final, state.suspect)
        return state.log_likelihood, final, state.suspect

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        problem, state = Problem(*saved[: len(Problem._fields)]), State(*saved[len(Problem._fields) :])
        out = ctx.kernels.backward(problem, state, grads[0])
        blocks, kept = problem.w.shape[:2]
        layout = [
            out.u[:blocks, :kept], out.w, out.log_normalizer[:blocks, :kept], out.log_start, out.log_emission,
            *(None, None, None),
        ]  # fmt: skip
        if ctx.given[-1] is not None:
            then = ctx.given[-1][1][1]
            carried = problem.source[:, :1] >= blocks
            layout[5:] = [
                torch.where(carried, out.initial[:, :then], 0.0), out.u[blocks:, :then],
                out.log_normalizer[blocks:, :then],
            ]  # fmt: skip
        shaped = (
            g if g is None or x is None else g.reshape(x[1]).to(x[0]) for g, x in zip(layout, ctx.given, strict=True)
        )
        return None, None, *shaped


def _check(
    tokens: Tensor, block_of_word: Tensor, u: Tensor, w: Tensor, log_normalizer: Tensor, log_start: Tensor,
    log_emission: Tensor, initial: Initial | None, restart: Tensor | None,
) -> None:  # fmt: skip
    """Shapes only: nothing here waits for the device."""
    if tokens.dim() != 2 or not tokens.numel():
        raise InputError(f"blocked_scan: tokens {list(tokens.shape)} must be [B, T] with at least one word")
    states, h = u.shape
    words, kept = log_emission.shape
    if states % kept:
        raise InputError(f"blocked_scan: {states} states are not blocks of {kept}, the width of log_emission")
    expected = {
        "w": (w, (states, h)), "log_normalizer": (log_normalizer, (states,)), "log_start": (log_start, (states,)),
        "block_of_word": (block_of_word, (words,)), "restart": (restart, tuple(tokens.shape)),
    }  # fmt: skip
    if initial is not None:
        then = initial.filtered.shape[1]
        rows = 1 if initial.u.shape[0] == 1 else tokens.shape[0]
        expected |= {
            "initial.filtered": (initial.filtered, (tokens.shape[0], then)), "initial.u": (initial.u, (rows, then, h)),
            "initial.log_normalizer": (initial.log_normalizer, (rows, then)),
        }  # fmt: skip
    for name, (x, shape) in expected.items():
        if x is not None and tuple(x.shape) != shape:
            raise InputError(f"blocked_scan: {name} is {list(x.shape)}, should be {list(shape)}")


def _check_words(tokens: Tensor, lengths: Tensor | None, words: int) -> None:
    outside = (tokens < 0) | (tokens >= words)
    if lengths is not None:
        if ((lengths < 0) | (lengths > tokens.shape[1])).any():
            raise InputError(f"blocked_scan: lengths {lengths.tolist()} are not all within 0 and {tokens.shape[1]}")
        outside &= torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    if outside.any():
        b, t = outside.nonzero()[0].tolist()
        raise InputError(f"blocked_scan: token {int(tokens[b, t])} at [{b}, {t}] is not one of the {words} words")
