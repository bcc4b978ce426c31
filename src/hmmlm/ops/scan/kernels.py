"""The device side of triton.py. A row is a position (t, b) of [T, B], number t·B + b; T·B·Z can pass 2^31."""
# mypy: allow-untyped-defs
# (arguments of kernels are pointers and numbers of Triton's own)

import triton
import triton.language as tl

_TINY = tl.constexpr(1.1754944e-38)  # below this float32 loses digits; its inverse does not overflow


@triton.jit
def emission_kernel(
    log_emission, words, order, emission, log_peak, n_tokens, N_WORDS,
    STATES: tl.constexpr, BLOCK_Z: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """emission[row] = p(word | z) / its largest over z, and the logarithm of that; ones and 0 for a missing token.

    A program takes tokens that are neighbours in the order of words, so that of what it reads of a row of
    log_emission [Z, V], 32 bytes at a time, little is for nothing.
    """
    k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = k < n_tokens
    row = tl.load(order + k, mask=inside, other=0)
    word = tl.load(words + k, mask=inside, other=-1).to(tl.int32)
    known = word >= 0
    peak = tl.full([BLOCK_N], -float("inf"), tl.float32)
    for first in range(0, STATES, BLOCK_Z):
        z = first + tl.arange(0, BLOCK_Z)
        at = z[:, None].to(tl.int64) * N_WORDS + word[None, :]
        scores = tl.load(log_emission + at, mask=(z < STATES)[:, None] & known[None, :], other=-float("inf"))
        peak = tl.maximum(peak, tl.max(scores, 0))
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    tl.store(log_peak + row, peak, mask=inside)
    for first in range(0, STATES, BLOCK_Z):
        z = first + tl.arange(0, BLOCK_Z)
        at = z[:, None].to(tl.int64) * N_WORDS + word[None, :]
        scores = tl.load(log_emission + at, mask=(z < STATES)[:, None] & known[None, :], other=-float("inf"))
        values = tl.where(known[None, :], tl.exp(scores - peak[None, :]), 1.0)
        mask = (z < STATES)[:, None] & inside[None, :]
        tl.store(emission + row[None, :].to(tl.int64) * STATES + z[:, None], values, mask=mask)


@triton.jit(do_not_specialize=["t"])
def forward_kernel(
    joint, transition, start, emission, restart, predicted, partial, t, kept, BATCH,
    BEGINS: tl.constexpr, RESTARTS: tl.constexpr, STATES: tl.constexpr, TILES: tl.constexpr,
    TILES_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_Z: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Step t for a block of sequences and of states: predicted p(z_t | x_1..t−1), and joint = predicted · emission.

    joint[t] is what step t starts from and joint[t + 1] what it leaves, not normalised: partial[t, b, tile] is its sum
    over the states of a tile, and the next step divides. Before the product by a power of two near the mass, which
    costs no digits and keeps what is small from underflowing in the product; after it by the rest.
    """
    tile = tl.program_id(0)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    z = tile * BLOCK_Z + tl.arange(0, BLOCK_Z)
    here, inside = b < BATCH, z < STATES
    mask = here[:, None] & inside[None, :]
    row = t.to(tl.int64) * BATCH + b
    scores = tl.load(emission + row[:, None] * STATES + z[None, :], mask=mask, other=0.0)
    if BEGINS:
        guess = tl.zeros([BLOCK_B, BLOCK_Z], tl.float32) + tl.load(start + z, mask=inside, other=0.0)[None, :]
    else:
        part = tl.arange(0, TILES_WIDTH)
        parts = tl.load(
            partial + (row - BATCH)[:, None] * TILES + part[None, :],
            mask=(here & (row >= BATCH))[:, None] & (part < TILES)[None, :], other=0.0,
        )
        mass = tl.where(row >= BATCH, tl.sum(parts, 1), 1.0)  # what a window starts from is taken as it is
        some = mass >= _TINY
        power = tl.where(some, tl.exp2(-tl.floor(tl.log2(tl.where(some, mass, 1.0)))), 0.0)
        guess = tl.zeros([BLOCK_B, BLOCK_Z], tl.float32)
        for first in range(0, STATES, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            x = tl.load(
                joint + row[:, None] * STATES + k[None, :], mask=here[:, None] & (k < STATES)[None, :], other=0.0
            )
            a = tl.load(
                transition + k[:, None] * STATES + z[None, :], mask=(k < STATES)[:, None] & inside[None, :], other=0.0
            )
            x = (x.to(tl.float32) * power[:, None]).to(a.dtype)
            guess = tl.dot(x, a, guess, input_precision=PRECISION)
        guess = guess * tl.where(some, 1.0 / tl.where(some, mass * power, 1.0), 0.0)[:, None]
        if RESTARTS:
            fresh = tl.load(restart + row, mask=here, other=0) != 0
            guess = tl.where(fresh[:, None], tl.load(start + z, mask=inside, other=0.0)[None, :], guess)
    tl.store(predicted + (t.to(tl.int64) * kept + b)[:, None] * STATES + z[None, :], guess, mask=mask)
    guess = guess * scores
    tl.store(partial + row * TILES + tile, tl.sum(guess, 1), mask=here)
    tl.store(joint + (row + BATCH)[:, None] * STATES + z[None, :], guess.to(joint.dtype.element_ty), mask=mask)


@triton.jit
def finish_kernel(
    partial, log_peak, emission, predicted, scale, log_likelihood, final, STEPS, kept, BATCH,
    STATES: tl.constexpr, TILES: tl.constexpr, TILES_WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """What is left of the forward pass, a program a sequence: scale, log-likelihood and the last α."""
    b = tl.program_id(0)
    part = tl.arange(0, TILES_WIDTH)
    total = tl.zeros([BLOCK_T], tl.float64)
    for first in range(0, STEPS, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        row = t.to(tl.int64) * BATCH + b
        inside = t < STEPS
        mask = inside[:, None] & (part < TILES)[None, :]
        mass = tl.sum(tl.load(partial + row[:, None] * TILES + part[None, :], mask=mask, other=0.0), 1)
        tl.store(scale + row, mass, mask=inside)
        peak = tl.load(log_peak + row, mask=inside, other=0.0)
        total += tl.log(tl.where(inside, mass, 1.0).to(tl.float64)) + peak.to(tl.float64)
    tl.store(log_likelihood + b, tl.sum(total, 0).to(tl.float32))
    last = (STEPS - 1).to(tl.int64)
    row = last * BATCH + b
    mass = tl.sum(tl.load(partial + row * TILES + part, mask=part < TILES, other=0.0), 0)
    inverse = 1.0 / tl.maximum(mass, _TINY)
    for first in range(0, STATES, BLOCK_Z):
        z = first + tl.arange(0, BLOCK_Z)
        guess = tl.load(predicted + (last * kept + b) * STATES + z, mask=z < STATES, other=0.0)
        scores = tl.load(emission + row * STATES + z, mask=z < STATES, other=0.0)
        tl.store(final + b * STATES + z, guess * scores * inverse, mask=z < STATES)


@triton.jit(do_not_specialize=["t"])
def backward_kernel(
    weights, transition, emission, predicted, scale, seed, restart, alpha, posterior, t, FLOOR, BATCH,
    LAST: tl.constexpr, RESTARTS: tl.constexpr, STATES: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_Z: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Step t for a block of sequences and of states: posterior p(z_t | x) and weights, times seed; alpha[t + 1] = α_t.

    weights[t] = posterior / predicted, zero where the chain restarts: nothing leads there. See `torch.backward`.
    """
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    z = tl.program_id(0) * BLOCK_Z + tl.arange(0, BLOCK_Z)
    here, inside = b < BATCH, z < STATES
    mask = here[:, None] & inside[None, :]
    row = t.to(tl.int64) * BATCH + b
    at = row[:, None] * STATES + z[None, :]
    scores = tl.load(emission + at, mask=mask, other=0.0)
    guess = tl.load(predicted + at, mask=mask, other=0.0)
    mass = tl.load(scale + row, mask=here, other=0.0)
    weight = tl.load(seed + b, mask=here, other=0.0)
    message = tl.zeros([BLOCK_B, BLOCK_Z], tl.float32)
    if LAST:
        message += weight[:, None]
    else:
        for first in range(0, STATES, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            x = tl.load(
                weights + (row + BATCH)[:, None] * STATES + k[None, :],
                mask=here[:, None] & (k < STATES)[None, :], other=0.0,
            )
            a = tl.load(
                transition + z[None, :] * STATES + k[:, None], mask=(k < STATES)[:, None] & inside[None, :], other=0.0
            )
            message = tl.dot(x, a, message, input_precision=PRECISION)
        if RESTARTS:
            fresh = tl.load(restart + row + BATCH, mask=here, other=0) != 0
            message = tl.where(fresh[:, None], weight[:, None], message)
    some = mass >= _TINY
    factor = scores * tl.where(some, 1.0 / tl.where(some, mass, 1.0), 0.0)[:, None]
    share = guess * factor
    # Predicted too, where a step had little mass: 1 / predicted bounds the weight, so nothing overflows.
    weight_of = tl.where((share >= FLOOR) & (guess >= FLOOR), message * factor, 0.0)
    tl.store(posterior + at, guess * weight_of, mask=mask)
    tl.store(alpha + at + BATCH * STATES, tl.where(share > 0, share, 0.0).to(alpha.dtype.element_ty), mask=mask)
    if RESTARTS:
        begins = tl.load(restart + row, mask=here, other=0) != 0
        weight_of = tl.where(begins[:, None], 0.0, weight_of)
    tl.store(weights + at, weight_of.to(weights.dtype.element_ty), mask=mask)


@triton.jit
def emission_counts_kernel(
    words, order, edges, posterior, counts, N_WORDS,
    STATES: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Z: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """counts[z, v] = Σ posterior[row, z] over the rows where v is, for a block of words and of states.

    Rows in the order of words: those of this block's words are edges[block] up to edges[block + 1]. Which of them go to
    which word is a product with zeros and ones, so frequent words take no longer than as many rare ones; no two
    programs write to the same place, so the sum is always in the same order.
    """
    block = tl.program_id(0)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    z = tl.program_id(1) * BLOCK_Z + tl.arange(0, BLOCK_Z)
    begin = tl.load(edges + block)
    end = tl.load(edges + block + 1)
    total = tl.zeros([BLOCK_V, BLOCK_Z], tl.float32)
    for first in range(begin, end, BLOCK_N):
        k = first + tl.arange(0, BLOCK_N)
        row = tl.load(order + k, mask=k < end, other=0)
        word = tl.load(words + k, mask=k < end, other=-1).to(tl.int32)
        values = tl.load(
            posterior + row[:, None].to(tl.int64) * STATES + z[None, :],
            mask=(k < end)[:, None] & (z < STATES)[None, :], other=0.0,
        )
        is_word = (word[None, :] == v[:, None]).to(tl.float32)
        total = tl.dot(is_word, values, total, input_precision="tf32x3")
    mask = (v < N_WORDS)[:, None] & (z < STATES)[None, :]
    tl.store(counts + z[None, :].to(tl.int64) * N_WORDS + v[:, None], total, mask=mask)
