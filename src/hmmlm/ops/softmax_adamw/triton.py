"""AdamW on logits in one pass over logits and moments, after a pass over the batch for the norm of the gradient.

The step is that of `torch.nn.utils.clip_grads_with_norm_` and `torch.optim.AdamW`. Nothing waits for the device.
"""
# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers)

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmmlm.ops.softmax_adamw import GradientNorm, LogitGradient, Moments, Settings

_NORM = {"BLOCK_N": 32, "BLOCK_Z": 64, "num_warps": 4}
_UPDATE = {"BLOCK_Z": 32, "BLOCK_V": 64, "num_warps": 4}
_PLAN = 1024  # states that are read at once, and the most norms of other parameters
_NEVER = -1e30  # logarithm of a β of 0


@triton.jit
def norm_kernel(
    words,
    order,
    scores,
    sums,
    total,
    squares,
    n_tokens,
    STATES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """One program per block of tokens and of states: Σ g² over the words that have their first place in the block."""
    k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    z = tl.program_id(1) * BLOCK_Z + tl.arange(0, BLOCK_Z)
    here, inside = k < n_tokens, z < STATES
    word = tl.load(words + k, mask=here, other=-1).to(tl.int32)
    before = tl.load(words + k - 1, mask=here & (k > 0), other=-1).to(tl.int32)
    mask = ((word >= 0) & (word != before))[:, None] & inside[None, :]
    row = tl.load(order + k, mask=here, other=0).to(tl.int64)
    score = tl.load(scores + row[:, None] * STATES + z[None, :], mask=mask, other=-float("inf"))
    column = tl.load(sums + k[:, None].to(tl.int64) * STATES + z[None, :], mask=mask, other=0.0)
    gradient = column - tl.exp(score) * tl.load(total + z, mask=inside, other=0.0)[None, :]
    found = tl.sum(tl.sum(tl.where(mask, gradient * gradient, 0.0), 1), 0)
    tl.store(squares + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), found)


@triton.jit
def plan_kernel(
    squares,
    others,
    total,
    spread,
    rate,
    step,
    norm,
    plan,
    STATES,
    N_OTHERS,
    CLIP: tl.constexpr,
    DECAY: tl.constexpr,
    LOG_BETA1: tl.constexpr,
    LOG_BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the norm of the gradient of all parameters, and the factors of a step.

    plan is the factor of the gradient, the factor of the logits, the step size and 1 / √(1 − β₂^step).
    """
    factor = 1.0
    if CLIP > 0:
        parts = tl.zeros([BLOCK], tl.float32)
        for first in range(0, STATES, BLOCK):
            z = first + tl.arange(0, BLOCK)
            whole = tl.load(total + z, mask=z < STATES, other=0.0)
            parts += whole * whole * tl.load(spread + z, mask=z < STATES, other=0.0)
        k = tl.arange(0, BLOCK)
        other = tl.load(others + k, mask=k < N_OTHERS, other=0.0)
        found = tl.sqrt(tl.sum(parts + other * other, 0) + tl.load(squares))
        tl.store(norm, found)
        factor = CLIP / (found + 1e-6)
        factor = tl.where(factor > 1.0, 1.0, factor)  # a norm of NaN remains
    steps = tl.load(step) + 1.0
    tl.store(step, steps)
    size = tl.load(rate)
    correction1 = 1.0 - tl.exp(steps.to(tl.float64) * LOG_BETA1)
    correction2 = 1.0 - tl.exp(steps.to(tl.float64) * LOG_BETA2)
    tl.store(plan, factor)
    tl.store(plan + 1, 1.0 - size * DECAY)
    tl.store(plan + 2, (size / correction1).to(tl.float32))
    tl.store(plan + 3, (1.0 / tl.sqrt(correction2)).to(tl.float32))


@triton.jit
def update_kernel(
    logits,
    exp_avg,
    exp_avg_sq,
    log_normalizer,
    total,
    edges,
    sums,
    plan,
    N_WORDS,
    STATES: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program per block of words and of states: the gradient and the step of AdamW."""
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    z = tl.program_id(1) * BLOCK_Z + tl.arange(0, BLOCK_Z)
    known, inside = v < N_WORDS, z < STATES
    mask = inside[:, None] & known[None, :]
    at = z[:, None].to(tl.int64) * N_WORDS + v[None, :]
    value = tl.load(logits + at, mask=mask, other=0.0)
    mean = tl.load(exp_avg + at, mask=mask, other=0.0)
    square = tl.load(exp_avg_sq + at, mask=mask, other=0.0)
    begin = tl.load(edges + v, mask=known, other=0)
    end = tl.load(edges + v + 1, mask=known, other=0)
    column = tl.load(
        sums + begin[None, :].to(tl.int64) * STATES + z[:, None],
        mask=inside[:, None] & (begin < end)[None, :],
        other=0.0,
    )
    normalizer = tl.load(log_normalizer + z, mask=inside, other=0.0)[:, None]
    whole = tl.load(total + z, mask=inside, other=0.0)[:, None]
    gradient = (column - tl.exp(value - normalizer) * whole) * tl.load(plan)
    mean = BETA1 * mean + (1.0 - BETA1) * gradient
    square = BETA2 * square + (1.0 - BETA2) * gradient * gradient
    change = tl.load(plan + 2) * mean / (tl.sqrt(square) * tl.load(plan + 3) + EPS)
    tl.store(logits + at, value * tl.load(plan + 1) - change, mask=mask)
    tl.store(exp_avg + at, mean, mask=mask)
    tl.store(exp_avg_sq + at, square, mask=mask)


def square_norm(gradient: LogitGradient) -> Tensor:
    """Return the squared norm [] of the gradient in the columns of the words of the batch."""
    count, states = gradient.sums.shape
    grid = triton.cdiv(count, _NORM["BLOCK_N"]), triton.cdiv(states, _NORM["BLOCK_Z"])
    parts = gradient.total.new_empty(grid)
    norm_kernel[grid](
        gradient.words,
        gradient.order,
        gradient.scores,
        gradient.sums,
        gradient.total,
        parts,
        count,
        STATES=states,
        **_NORM,
    )
    return parts.sum()


def plan_step(
    gradient: LogitGradient, parts: GradientNorm, moments: Moments, settings: Settings, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the norm [] of the whole gradient (undefined without clipping) and the factors of the step; count it.

    Args:
        parts: of that norm; there are at most a thousand other parameters.
        rate: [] the learning rate.
    """
    states = gradient.sums.shape[1]
    norm, plan = torch.empty_like(parts.words), gradient.total.new_empty(4)
    log_betas = [math.log(beta) if beta else _NEVER for beta in settings.betas]
    plan_kernel[(1,)](
        parts.words,
        parts.others,
        gradient.total,
        gradient.spread,
        rate,
        moments.step,
        norm,
        plan,
        states,
        len(parts.others),
        CLIP=settings.max_grad_norm,
        DECAY=settings.weight_decay,
        LOG_BETA1=log_betas[0],
        LOG_BETA2=log_betas[1],
        BLOCK=_PLAN,
        num_warps=4,
    )
    return norm, plan


def update(logits: Tensor, gradient: LogitGradient, moments: Moments, settings: Settings, plan: Tensor) -> None:
    """Take the planned step: change logits [Z, V] and moments."""
    states, n_words = logits.shape
    update_kernel[(triton.cdiv(n_words, _UPDATE["BLOCK_V"]), triton.cdiv(states, _UPDATE["BLOCK_Z"]))](
        logits,
        moments.exp_avg,
        moments.exp_avg_sq,
        gradient.log_normalizer,
        gradient.total,
        gradient.edges,
        gradient.sums,
        plan,
        n_words,
        STATES=states,
        BETA1=settings.betas[0],
        BETA2=settings.betas[1],
        EPS=settings.eps,
        **_UPDATE,
    )
