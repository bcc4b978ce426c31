"""Kernels of triton.py. A row is a position (t, b) of [T, B] with index t·B + b; T·B·Z can exceed 2^31.

Both recursions have the same form: guess times the emissions of the word, divided by the sum, times a matrix, is the
next guess. Forward, guess starts as the start distribution and the matrix is the transition: guess is
p(z_t | x_1..t−1), and the result of a step is α. Backward, guess starts as ones and the matrix is transposed: the
result of a step is proportional to p(x_t.. | z_t). `back` is 0 for the forward and 1 for the backward recursion.

joint [2, T+1, B, Z] holds the results of the steps. Forward results are shifted by one, so that slot 0 holds the carry:
step t reads slot t + back and writes slot t + 1 − back.
"""
# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers)

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_TINY = tl.constexpr(1.1754944e-38)  # smallest normal float32; its inverse does not overflow


@triton.jit
def _place(places, row, mask, INDEXED: tl.constexpr):
    """Return where the scores of a row are: in the row itself, or in the one of its word if INDEXED."""
    if INDEXED:
        row = tl.load(places + row, mask=mask, other=0).to(tl.int64)
    return row


@triton.jit
def gather_kernel(
    log_emission,
    log_normalizer,
    words,
    order,
    scores,
    log_peak,
    n_tokens,
    N_WORDS,
    NORMALIZED: tl.constexpr,
    STATES: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per block of tokens: scores[row] = log p(word | z) and its maximum over z; zeros for a missing token.

    Unless NORMALIZED, log_emission are logits, and log_normalizer [Z] is subtracted.

    The tokens of a program are neighbors in the order of words, so most of each 32-byte read from a row of
    log_emission [Z, V] is used. Tokens are the first axis of its blocks, which assigns neighboring words to neighboring
    threads where the compiler cannot infer contiguity.
    """
    k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = k < n_tokens
    row = tl.load(order + k, mask=inside, other=0)
    word = tl.load(words + k, mask=inside, other=-1).to(tl.int32)
    known = (word >= 0)[:, None]
    peak = tl.full([BLOCK_N, BLOCK_Z], -float("inf"), tl.float32)
    for first in range(0, STATES, BLOCK_Z):
        z = first + tl.arange(0, BLOCK_Z)
        here = (z < STATES)[None, :]
        values = tl.load(
            log_emission + z[None, :].to(tl.int64) * N_WORDS + word[:, None], mask=known & here, other=-float("inf")
        )
        if not NORMALIZED:
            values -= tl.load(log_normalizer + z, mask=z < STATES, other=0.0)[None, :]
        peak = tl.maximum(peak, values)
        values = tl.where(known, values, 0.0)
        tl.store(scores + row[:, None].to(tl.int64) * STATES + z[None, :], values, mask=inside[:, None] & here)
    most = tl.max(peak, 1)
    tl.store(log_peak + row, tl.where(most == -float("inf"), 0.0, most), mask=inside)


@triton.jit(do_not_specialize=["t"])
def step_kernel(
    joint,
    transition,
    start,
    scores,
    log_peak,
    places,
    restart,
    predicted,
    partial,
    t,
    STEPS,
    kept,
    BATCH,
    BEGINS: tl.constexpr,
    CARRIED: tl.constexpr,
    RESTARTS: tl.constexpr,
    INDEXED: tl.constexpr,
    STATES: tl.constexpr,
    TILES: tl.constexpr,
    TILES_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per block of sequences, block of states and direction: step t forward, or T − 1 − t backward.

    If it OVERLAPS, a step is launched while the one before still runs, and reads nothing of that before the wait.

    The result in joint is not yet divided: partial[back, row, tile] is its sum over the states of a tile, and the next
    step divides. It divides by a power of two near the mass before the product, which is exact and keeps small values
    from underflowing in the product, and by the rest after it. transition is [2, Z, Z]; the second is transposed.
    """
    tile, back = tl.program_id(0), tl.program_id(2)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    z = tile * BLOCK_Z + tl.arange(0, BLOCK_Z)
    here, inside = b < BATCH, z < STATES
    mask = here[:, None] & inside[None, :]
    row = (t + back * (STEPS - 1 - 2 * t)).to(tl.int64) * BATCH + b
    joint += back.to(tl.int64) * (STEPS + 1) * BATCH * STATES
    partial += back.to(tl.int64) * STEPS * BATCH * TILES
    place = _place(places, row, here, INDEXED)
    peak = tl.load(log_peak + place, mask=here, other=0.0)
    emission = tl.exp(
        tl.load(scores + place[:, None] * STATES + z[None, :], mask=mask, other=-float("inf")) - peak[:, None]
    )
    guess = tl.zeros([BLOCK_B, BLOCK_Z], tl.float32)
    anew = tl.where(back == 0, tl.load(start + z, mask=inside, other=0.0), 1.0)[None, :]
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    if BEGINS and not CARRIED:
        guess += anew
    else:
        mass = tl.full([BLOCK_B], 1.0, tl.float32)  # the carry is not rescaled
        fresh = b < 0
        if BEGINS:
            fresh |= back == 1
        else:
            part = tl.arange(0, TILES_WIDTH)
            parts = partial + (row + (2 * back - 1) * BATCH)[:, None] * TILES + part[None, :]
            mass = tl.sum(tl.load(parts, mask=here[:, None] & (part < TILES)[None, :], other=0.0), 1)
        some = mass >= _TINY
        power = tl.where(some, tl.exp2(-tl.floor(tl.log2(tl.where(some, mass, 1.0)))), 0.0)
        rest = tl.where(some, 1.0 / tl.where(some, mass * power, 1.0), 0.0)
        filled = here & (fresh == 0)  # the backward recursion has nothing to read at the last position
        for first in range(0, STATES, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            x = tl.load(
                joint + (row + back * BATCH)[:, None] * STATES + k[None, :],
                mask=filled[:, None] & (k < STATES)[None, :],
                other=0.0,
            )
            a = tl.load(
                transition + (back * STATES + k)[:, None] * STATES + z[None, :],
                mask=(k < STATES)[:, None] & inside[None, :],
                other=0.0,
            )
            x = (x.to(tl.float32) * power[:, None]).to(a.dtype)
            # Multiply by rest here, not after the loop: using the product makes the compiler wait for it. Otherwise, on
            # a Hopper GPU, the product could still read x from registers that the next iteration overwrites.
            guess += rest[:, None] * tl.dot(x, a, input_precision=PRECISION)
        if RESTARTS:
            fresh |= tl.load(restart + row + back * BATCH, mask=filled, other=0) != 0
        guess = tl.where(fresh[:, None], anew, guess)
    if back == 0:
        tl.store(predicted + (t.to(tl.int64) * kept + b)[:, None] * STATES + z[None, :], guess, mask=mask)
    guess = guess * emission
    tl.store(partial + row * TILES + tile, tl.sum(guess, 1), mask=here)
    at = (row + (1 - back) * BATCH)[:, None] * STATES + z[None, :]
    tl.store(joint + at, guess.to(joint.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["t"])
def divide_kernel(
    guess,
    start,
    scores,
    log_peak,
    places,
    restart,
    joint,
    partial,
    t,
    kept,
    BATCH,
    BACK: tl.constexpr,
    BEGINS: tl.constexpr,
    RESTARTS: tl.constexpr,
    INDEXED: tl.constexpr,
    STATES: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """One program per sequence: finish step t of one recursion after its product; stores the divided joint."""
    b = tl.program_id(0)
    z = tl.arange(0, BLOCK_Z)
    inside = z < STATES
    row = t.to(tl.int64) * BATCH + b
    place = _place(places, row, True, INDEXED)
    values = tl.load(scores + place * STATES + z, mask=inside, other=-float("inf"))
    at = guess + (t.to(tl.int64) * kept + b) * STATES + z
    fresh = BEGINS
    found = tl.zeros([BLOCK_Z], tl.float32)
    if not BEGINS:
        found = tl.load(at, mask=inside, other=0.0)
        if RESTARTS:
            fresh = tl.load(restart + row + BACK * BATCH) != 0
    if fresh:
        found = tl.full([BLOCK_Z], 1.0, tl.float32)
        if not BACK:
            found = tl.load(start + z, mask=inside, other=0.0)
            tl.store(at, found, mask=inside)
    found = found * tl.exp(values - tl.load(log_peak + place))
    mass = tl.sum(tl.where(inside, found, 0.0), 0)
    tl.store(partial + row, mass)
    some = mass >= _TINY
    found = found * tl.where(some, 1.0 / tl.where(some, mass, 1.0), 0.0)
    to = joint + (row + (1 - BACK) * BATCH) * STATES + z
    tl.store(to, found.to(joint.dtype.element_ty), mask=inside)


@triton.jit
def meet_kernel(
    predicted,
    joint,
    partial,
    agreement,
    STEPS,
    BATCH,
    DIVIDED: tl.constexpr,
    STATES: tl.constexpr,
    TILES: tl.constexpr,
    TILES_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """One program per block of rows: agreement[row] = Σ_z predicted · joint[1]; also divides α unless DIVIDED."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = row < STEPS.to(tl.int64) * BATCH
    ahead = joint + (STEPS + 1).to(tl.int64) * BATCH * STATES
    part = tl.arange(0, TILES_WIDTH)
    parts = partial + row[:, None] * TILES + part[None, :]
    mass = tl.sum(tl.load(parts, mask=here[:, None] & (part < TILES)[None, :], other=0.0), 1)
    some = mass >= _TINY
    inverse = tl.where(some, 1.0 / tl.where(some, mass, 1.0), 0.0)[:, None]
    total = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, STATES, BLOCK_Z):
        z = first + tl.arange(0, BLOCK_Z)
        mask = here[:, None] & (z < STATES)[None, :]
        at = row[:, None] * STATES + z[None, :]
        guess = tl.load(predicted + at, mask=mask, other=0.0)
        total += tl.sum(guess * tl.load(ahead + at, mask=mask, other=0.0).to(tl.float32), 1)
        if not DIVIDED:
            alpha = joint + at + BATCH * STATES
            value = tl.load(alpha, mask=mask, other=0.0).to(tl.float32) * inverse
            tl.store(alpha, value.to(joint.dtype.element_ty), mask=mask)
    tl.store(agreement + row, total, mask=here)


@triton.jit
def finish_kernel(
    partial,
    log_peak,
    scores,
    places,
    predicted,
    agreement,
    scale,
    log_likelihood,
    carry,
    meeting,
    suspect,
    STEPS,
    kept,
    BATCH,
    LEAST_SCALE,
    LEAST_MEETING,
    INDEXED: tl.constexpr,
    KEPT: tl.constexpr,
    DIVIDED: tl.constexpr,
    STATES: tl.constexpr,
    TILES: tl.constexpr,
    TILES_WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """One program per sequence: compute the remaining fields of `triton.KernelForward`."""
    b = tl.program_id(0)
    part = tl.arange(0, TILES_WIDTH)
    total = tl.zeros([BLOCK_T], tl.float64)
    least = tl.full([BLOCK_T], float("inf"), tl.float32)
    near = tl.full([BLOCK_T], float("inf"), tl.float32)
    bad = tl.zeros([BLOCK_T], tl.int32)  # a minimum ignores NaN
    for first in range(0, STEPS, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        row = t.to(tl.int64) * BATCH + b
        inside = t < STEPS
        mask = inside[:, None] & (part < TILES)[None, :]
        mass = tl.sum(tl.load(partial + row[:, None] * TILES + part[None, :], mask=mask, other=0.0), 1)
        tl.store(scale + row, mass, mask=inside)
        mass = tl.where(inside, mass, 1.0)
        peak = tl.load(log_peak + _place(places, row, inside, INDEXED), mask=inside, other=0.0)
        total += tl.log(mass.to(tl.float64)) + peak.to(tl.float64)
        least = tl.minimum(least, mass)
        bad |= (mass != mass).to(tl.int32)
        if KEPT:
            met = tl.load(agreement + row, mask=inside, other=1.0)
            if DIVIDED:  # relative to the mass before division
                met *= tl.load(partial + STEPS.to(tl.int64) * BATCH + row, mask=inside, other=1.0)
            near = tl.minimum(near, met)
            bad |= (met != met).to(tl.int32)
    tl.store(log_likelihood + b, tl.sum(total, 0).to(tl.float32))
    tl.store(meeting + b, tl.min(near, 0))
    sound = (tl.min(least, 0) >= LEAST_SCALE) & (tl.min(near, 0) >= LEAST_MEETING) & (tl.max(bad, 0) == 0)
    tl.store(suspect + b, tl.where(sound, 0, 1).to(tl.uint8))
    last = (STEPS - 1).to(tl.int64)
    row = last * BATCH + b
    mass = tl.sum(tl.load(partial + row * TILES + part, mask=part < TILES, other=0.0), 0)
    place = _place(places, row, True, INDEXED)
    shift = tl.load(log_peak + place) + tl.log(mass)
    for first in range(0, STATES, BLOCK_Z):
        z = first + tl.arange(0, BLOCK_Z)
        guess = tl.load(predicted + (last * kept + b) * STATES + z, mask=z < STATES, other=0.0)
        score = tl.load(scores + place * STATES + z, mask=z < STATES, other=-float("inf"))
        value = tl.where(mass > 0, tl.log(guess) + score - shift, -float("inf"))
        tl.store(carry + b * STATES + z, value.to(tl.float64), mask=z < STATES)


@triton.jit
def _factor(agreement, seed, row, b, here):
    """Return the factor that turns joint[1] into w times seed (see `scaled.backward`); 0 where agreement underflows.

    The factor cannot overflow: sequences with a small agreement are suspect or recomputed, and have a seed of 0.
    """
    met = tl.load(agreement + row, mask=here, other=0.0)
    weight = tl.load(seed + b, mask=here, other=0.0)
    some = met >= _TINY
    return tl.where(some, weight / tl.where(some, met, 1.0), 0.0)


@triton.jit
def weigh_kernel(
    ahead,
    agreement,
    seed,
    restart,
    weights,
    begun,
    BATCH,
    CARRIED: tl.constexpr,
    RESTARTS: tl.constexpr,
    STATES: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """One program per step, block of states and part of the sequences: compute w times seed.

    weights holds it where the position has a predecessor; begun[part, t, z] sums it over the sequences of a part where
    the chain begins.
    """
    t, part, parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    z = tl.program_id(0) * BLOCK_Z + tl.arange(0, BLOCK_Z)
    total = tl.zeros([BLOCK_Z], tl.float32)
    for first in range(part * BLOCK_B, BATCH, parts * BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        here = b < BATCH
        row = t.to(tl.int64) * BATCH + b
        factor = _factor(agreement, seed, row, b, here)[:, None]
        mask = here[:, None] & (z < STATES)[None, :]
        at = row[:, None] * STATES + z[None, :]
        value = tl.where(factor != 0, tl.load(ahead + at, mask=mask, other=0.0).to(tl.float32) * factor, 0.0)
        begins = b < 0
        if not CARRIED:
            begins |= t == 0
        if RESTARTS:
            begins |= tl.load(restart + row, mask=here, other=0) != 0
        total += tl.sum(tl.where(begins[:, None], value, 0.0), 0)
        value = tl.where(begins[:, None], 0.0, value)
        tl.store(weights + at, value.to(weights.dtype.element_ty), mask=mask)
    tl.store(begun + (part * tl.num_programs(1) + t) * STATES + z, total, mask=z < STATES)
