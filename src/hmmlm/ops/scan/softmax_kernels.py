"""Kernels of softmax rows: probabilities and normalizers, the gradient of logits, and expected counts by word.

Those with a program per row read it twice at most, the second time from the cache. The tokens of a batch are sorted by
word and cut into chunks of BLOCK_N. `sums` [T·B, Z] has a row per place in that order; the counts of a word are in the
row of its first place.
"""
# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers)

import triton
import triton.language as tl

from hmmlm.ops.scan.kernels import _factor


@triton.jit
def softmax_kernel(logits, probs, log_normalizer, COLUMNS, BLOCK: tl.constexpr):
    """Compute probs = exp(logits − log_normalizer), rounded to their dtype, with log_normalizer = log Σ exp(logits).

    Every lane keeps the maximum of its own columns.
    """
    row = tl.program_id(0).to(tl.int64)
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        k = first + tl.arange(0, BLOCK)
        value = tl.load(logits + row * COLUMNS + k, mask=k < COLUMNS, other=-float("inf"))
        highest = tl.maximum(peak, value)
        origin = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * tl.exp(peak - origin) + tl.exp(value - origin)
        peak = highest
    origin = tl.max(peak, 0)
    normalizer = tl.log(tl.sum(total * tl.exp(peak - origin), 0)) + origin
    tl.store(log_normalizer + row, normalizer)
    for first in range(0, COLUMNS, BLOCK):
        k = first + tl.arange(0, BLOCK)
        value = tl.load(logits + row * COLUMNS + k, mask=k < COLUMNS, other=-float("inf"))
        tl.store(probs + row * COLUMNS + k, tl.exp(value - normalizer).to(probs.dtype.element_ty), mask=k < COLUMNS)


@triton.jit
def softmax_gradient_kernel(gradient, logits, log_normalizer, norms, COLUMNS, BLOCK: tl.constexpr):
    """Replace the gradient g of the probabilities p by that of their logits, p · (g − Σ p · g); norms has its norm."""
    row = tl.program_id(0).to(tl.int64)
    normalizer = tl.load(log_normalizer + row)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        k = first + tl.arange(0, BLOCK)
        inside = k < COLUMNS
        prob = tl.exp(tl.load(logits + row * COLUMNS + k, mask=inside, other=-float("inf")) - normalizer)
        total += prob * tl.load(gradient + row * COLUMNS + k, mask=inside, other=0.0)
    mean = tl.sum(total, 0)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        k = first + tl.arange(0, BLOCK)
        inside = k < COLUMNS
        prob = tl.exp(tl.load(logits + row * COLUMNS + k, mask=inside, other=-float("inf")) - normalizer)
        found = prob * (tl.load(gradient + row * COLUMNS + k, mask=inside, other=0.0) - mean)
        squares += found * found
        tl.store(gradient + row * COLUMNS + k, found, mask=inside)
    tl.store(norms + row, tl.sqrt(tl.sum(squares, 0)))


@triton.jit
def mark_words_kernel(tokens, absent, n_tokens, BLOCK: tl.constexpr):
    """One program per block of tokens: absent[word] = 0 for every word of the batch."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(tokens + k, mask=k < n_tokens, other=-1).to(tl.int32)
    tl.store(absent + word, tl.zeros([BLOCK], tl.uint8), mask=word >= 0)


@triton.jit
def normalizer_kernel(logits, absent, log_normalizer, spread, COLUMNS, BLOCK: tl.constexpr):
    """One program per row: log Σ exp(logits), and spread = Σ p² over the words that are absent from the batch.

    Every lane keeps the maximum of its own columns, so that the logits are read once.
    """
    row = tl.program_id(0).to(tl.int64)
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        v = first + tl.arange(0, BLOCK)
        inside = v < COLUMNS
        value = tl.load(logits + row * COLUMNS + v, mask=inside, other=-float("inf"))
        unseen = tl.load(absent + v, mask=inside, other=0) != 0
        highest = tl.maximum(peak, value)
        origin = tl.where(highest == -float("inf"), 0.0, highest)
        shrink = tl.exp(peak - origin)
        value = tl.exp(value - origin)
        total = total * shrink + value
        squares = squares * shrink * shrink + tl.where(unseen, value * value, 0.0)
        peak = highest
    highest = tl.max(peak, 0)
    origin = tl.where(highest == -float("inf"), 0.0, highest)
    shrink = tl.exp(peak - origin)
    whole = tl.sum(total * shrink, 0)
    tl.store(log_normalizer + row, tl.log(whole) + origin)
    tl.store(spread + row, tl.sum(squares * shrink * shrink, 0) / (whole * whole))


@triton.jit
def sum_words_kernel(
    words,
    order,
    predicted,
    ahead,
    agreement,
    seed,
    sums,
    totals,
    n_tokens,
    BATCH,
    STATES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """One program per chunk and block of states: sums[first place of a word in the chunk] = Σ posterior · seed.

    totals[chunk, z] is the sum over the words of the chunk. A product with a 0/1 matrix adds rows to words. It is in
    bfloat16; each value is split into PARTS bfloat16 numbers: 2 hold 16 bits, 3 all 24 bits of float32. totals adds the
    numbers that the product adds. No two programs write to the same location, so the result is deterministic.
    """
    chunk = tl.program_id(0)
    k = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
    z = tl.program_id(1) * BLOCK_Z + tl.arange(0, BLOCK_Z)
    here = k < n_tokens
    row = tl.load(order + k, mask=here, other=0)
    word = tl.load(words + k, mask=here, other=-1).to(tl.int32)
    before = tl.load(words + k - 1, mask=here & (k > chunk * BLOCK_N), other=-1).to(tl.int32)
    known = word >= 0
    factor = _factor(agreement, seed, row, row % BATCH, known)[:, None]
    at = row[:, None].to(tl.int64) * STATES + z[None, :]
    mask = known[:, None] & (z < STATES)[None, :]
    value = tl.load(ahead + at, mask=mask, other=0.0).to(tl.float32) * factor
    value = tl.where(factor != 0, value * tl.load(predicted + at, mask=mask, other=0.0), 0.0)
    same = (word[:, None] == word[None, :]).to(tl.float32).to(tl.bfloat16)
    total = tl.zeros([BLOCK_N, BLOCK_Z], tl.float32)
    left = value
    for _ in tl.static_range(PARTS):
        piece = left.to(tl.bfloat16)
        total = tl.dot(same, piece, total)
        left -= piece.to(tl.float32)
    tl.store(totals + chunk * STATES + z, tl.sum(value - left, 0), mask=z < STATES)
    tl.store(sums + k[:, None].to(tl.int64) * STATES + z[None, :], total, mask=mask & (word != before)[:, None])


@triton.jit
def join_words_kernel(
    words,
    edges,
    sums,
    STATES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One program per chunk but the last and block of states: complete the sums of a word that starts here and goes on.

    Only the last word of a chunk can; its other sums are at the first places of the following chunks.
    """
    chunk = tl.program_id(0)
    z = tl.program_id(1) * BLOCK_Z + tl.arange(0, BLOCK_Z)
    last = (chunk + 1) * BLOCK_N - 1
    word = tl.load(words + last).to(tl.int32)
    begin = tl.load(edges + tl.maximum(word, 0))
    end = tl.load(edges + tl.maximum(word, 0) + 1)
    goes_on = (word >= 0) & (begin >= chunk * BLOCK_N) & (end > last + 1)
    end = tl.where(goes_on, end, 0)
    inside = z < tl.where(goes_on, STATES, 0)
    to = sums + begin.to(tl.int64) * STATES + z
    total = tl.load(to, mask=inside, other=0.0)
    for first in range(last + 1, end, CHUNKS * BLOCK_N):
        k = first + tl.arange(0, CHUNKS) * BLOCK_N
        at = sums + k[:, None].to(tl.int64) * STATES + z[None, :]
        total += tl.sum(tl.load(at, mask=(k < end)[:, None] & inside[None, :], other=0.0), 0)
    tl.store(to, total, mask=inside)


@triton.jit
def expand_words_kernel(
    edges,
    sums,
    counts,
    N_WORDS,
    STATES: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program per block of words and of states: counts [Z, V] from the columns of a batch's words."""
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    z = tl.program_id(1) * BLOCK_Z + tl.arange(0, BLOCK_Z)
    known, inside = v < N_WORDS, z < STATES
    begin = tl.load(edges + v, mask=known, other=0)
    end = tl.load(edges + v + 1, mask=known, other=0)
    column = tl.load(
        sums + begin[None, :].to(tl.int64) * STATES + z[:, None],
        mask=inside[:, None] & (begin < end)[None, :],
        other=0.0,
    )
    at = counts + z[:, None].to(tl.int64) * N_WORDS + v[None, :]
    tl.store(at, column, mask=inside[:, None] & known[None, :])
