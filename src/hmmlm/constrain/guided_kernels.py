"""GPU kernels of one token under constraints: from the states before a token to steered scores of the next.

Texts of a call have different guides, whose tables lie anywhere in memory. So the kernels take addresses, as integers
in `packet`: [scores, out, states, masses] of the call, then [state, token, group_of, table, plan] of each row, the last
three 0 if it is not constrained. A plan is an array of integers too: [number of tokens that are scored alone,
MOST_PLACES rows of the table or −1, then (token, row of the table) of each of these tokens]. One recorded CUDA graph
thus serves every guide.

The packet that the host writes, and `found`, to which kernels report, lie in memory of the host that the GPU can
access: a graph without copies is launched faster. The first kernel copies the packet for the others. A sum that
underflow may have changed sets found[0]: the result must then not be used. found[1 + row] is set where the most likely
token became another.

Rows are normalized in two kernels: the programs that compute steered scores each store a summary of theirs, and those
that divide read all summaries of a row.
"""
# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers)

import torch
import triton
import triton.language as tl

HEADER = 4  # numbers of a packet before those of its rows
OF_ROW = 5

_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_HEADER, _OF_ROW = tl.constexpr(HEADER), tl.constexpr(OF_ROW)


def kind_of(dtype: torch.dtype) -> tl.dtype:
    """Return Triton's type of scores."""
    return _KINDS[dtype]


@triton.jit
def _floats(address):
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def _integers(address):
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def read_kernel(written, packet, log_emission, probs, found, STATES, WORDS, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row: copy `written` to `packet`, and probs[row, z] = p(z | tokens so far, token) unless FIRST.

    Without a token, it is the state as it is.
    """
    row, number = tl.program_id(0), tl.arange(0, 8)
    begin = tl.where(row == 0, 0, _HEADER + row * _OF_ROW)
    end = _HEADER + (row + 1) * _OF_ROW
    for first in range(begin, end, 8):
        numbers = tl.load(written + first + number, mask=first + number < end)
        tl.store(packet + first + number, numbers, mask=first + number < end)
    if FIRST:
        return
    at = written + _HEADER + row * _OF_ROW
    state, token = _floats(tl.load(at)), tl.load(at + 1)
    out = probs + row.to(tl.int64) * STATES
    reading = token + tl.zeros([BLOCK], tl.int64) >= 0
    peaks = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, STATES, BLOCK):
        z = first + tl.arange(0, BLOCK)
        inside = z < STATES
        emitted = tl.load(log_emission + z.to(tl.int64) * WORDS + token, mask=inside & reading, other=0.0)
        peaks = tl.maximum(peaks, tl.load(state + z, mask=inside, other=-float("inf")) + emitted)
    peak = tl.max(peaks, 0)
    if peak == -float("inf"):
        tl.store(found, 1)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, STATES, BLOCK):
        z = first + tl.arange(0, BLOCK)
        inside = z < STATES
        emitted = tl.load(log_emission + z.to(tl.int64) * WORDS + token, mask=inside & reading, other=0.0)
        value = tl.exp(tl.load(state + z, mask=inside, other=-float("inf")) + emitted - peak)
        total += value
        tl.store(out + z, value, mask=inside)
    inverse = 1.0 / tl.sum(total, 0)
    for first in range(0, STATES, BLOCK):
        z = first + tl.arange(0, BLOCK)
        tl.store(out + z, tl.load(out + z, mask=z < STATES, other=0.0) * inverse, mask=z < STATES)


@triton.jit
def _log_state(state, moved, peak, z, STATES, STRIDE, FIRST: tl.constexpr, PARTS: tl.constexpr):
    """Return log p(z of the next token | tokens so far); and the scaled probability it is from."""
    if FIRST:
        value = tl.load(state + z, mask=z < STATES, other=-float("inf"))
        return value, tl.full(z.shape, 1.0, tl.float32)
    scaled = tl.load(moved + z, mask=z < STATES, other=1.0)
    for part in tl.static_range(1, PARTS):
        scaled += tl.load(moved + part * STRIDE + z, mask=z < STATES, other=0.0)
    return tl.where(z < STATES, tl.log(scaled) + tl.load(peak + z, mask=z < STATES, other=0.0), -float("inf")), scaled


@triton.jit
def weigh_kernel(
    packet,
    moved,
    peak,
    weights,
    tops,
    found,
    STATES,
    LEAST,
    FIRST: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and place (0: none): weights = exp(log p(z) + table − top), and top, their largest value.

    Sums over the PARTS of moved [PARTS, B, Z] · exp(peak) are the probabilities of states, stored for later calls.
    """
    row, place = tl.program_id(0), tl.program_id(1)
    at = packet + _HEADER + row * _OF_ROW
    states = _floats(tl.load(packet + 2)) + row.to(tl.int64) * STATES
    state = _floats(tl.load(at))
    moved += row.to(tl.int64) * STATES
    stride = tl.num_programs(0).to(tl.int64) * STATES
    constrained = tl.load(at + 2) != 0
    of_table = tl.load(_integers(tl.load(at + 4)) + place, mask=constrained & (place > 0), other=-1)
    table = _floats(tl.load(at + 3)) + of_table * STATES
    adding = of_table + tl.zeros([BLOCK], tl.int64) >= 0
    peaks = tl.full([BLOCK], -float("inf"), tl.float32)
    suspect = tl.zeros([BLOCK], tl.int32)
    for first in range(0, STATES, BLOCK):
        z = first + tl.arange(0, BLOCK)
        value, scaled = _log_state(state, moved, peak, z, STATES, stride, FIRST, PARTS)
        suspect |= (scaled < LEAST).to(tl.int32)
        if place == 0:
            tl.store(states + z, value, mask=z < STATES)
        peaks = tl.maximum(peaks, value + tl.load(table + z, mask=adding & (z < STATES), other=0.0))
    top = tl.where((place > 0) & (of_table < 0), -float("inf"), tl.max(peaks, 0))
    if (tl.max(suspect, 0) > 0) & constrained:
        tl.store(found, 1)
    index = row * tl.num_programs(1) + place
    tl.store(tops + index, top)
    shift = tl.where(top == -float("inf"), 0.0, top)
    for first in range(0, STATES, BLOCK):
        z = first + tl.arange(0, BLOCK)
        value, _ = _log_state(state, moved, peak, z, STATES, stride, FIRST, PARTS)
        value += tl.load(table + z, mask=adding & (z < STATES), other=0.0)
        weight = tl.where(top == -float("inf"), 0.0, tl.exp(value - shift))
        tl.store(weights + index.to(tl.int64) * STATES + z, weight, mask=z < STATES)


@triton.jit
def product_kernel(
    weights,
    matrix,
    sums,
    ROWS,
    STATES,
    COLUMNS,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per block of columns and part of the states: sums [part, ROWS ≤ BLOCK_M, COLUMNS] = weights · matrix.

    Three products of parts of 11 bits are as accurate as one in float32.
    """
    m, n = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part, parts = tl.program_id(1), tl.num_programs(1)
    sums += part.to(tl.int64) * ROWS * COLUMNS
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(part * BLOCK_K, STATES, parts * BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < STATES
        at = weights + m[:, None] * STATES + k[None, :]
        left = tl.load(at, mask=(m < ROWS)[:, None] & inside[None, :], other=0.0)
        at = matrix + k[:, None].to(tl.int64) * COLUMNS + n[None, :]
        right = tl.load(at, mask=inside[:, None] & (n < COLUMNS)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32x3")
    tl.store(sums + m[:, None] * COLUMNS + n[None, :], total, mask=(m < ROWS)[:, None] & (n < COLUMNS)[None, :])


@triton.jit
def _store_summary(summaries, number, top, mass, most, same):
    """Store the summary of some tokens of a row.

    These are the largest steered score, Σ exp(steered − that), the largest score before, and whether a token has both.
    """
    at = summaries + number.to(tl.int64) * 4
    tl.store(at, top)
    tl.store(at + 1, mass)
    tl.store(at + 2, most)
    tl.store(at + 3, same)


@triton.jit
def _steer(score, log_prob, WEIGHT):
    """Return score + WEIGHT · min(log_prob, 0), −inf where log_prob is."""
    return tl.where(log_prob == -float("inf"), -float("inf"), score + WEIGHT * tl.minimum(log_prob, 0.0))


@triton.jit(do_not_specialize=["PLACES"])  # the first calls of a model would wait for every number of places
def combine_kernel(
    packet,
    sums,
    tops,
    column_of,
    steered,
    summaries,
    found,
    WORDS,
    COLUMNS,
    WIDTH,
    LEAST,
    WEIGHT,
    PLACES,
    ENTRIES,
    KIND: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and block of tokens: scores weighted by log p(accepted); those scored alone are −inf for now.

    sums [B·(1 + PLACES), COLUMNS] are products with the emissions, of which equal columns are SHARED by words.
    """
    row = tl.program_id(0)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = packet + _HEADER + row * _OF_ROW
    scores = tl.load(packet).to(tl.pointer_type(KIND)) + row.to(tl.int64) * WIDTH
    score = tl.load(scores + v, mask=v < WIDTH, other=0.0).to(tl.float32)
    address = tl.load(at + 2)
    result = score
    if address != 0:
        inside = v < WORDS
        column = v
        if SHARED:
            column = tl.load(column_of + v, mask=inside, other=0)
        group = tl.load(address.to(tl.pointer_type(tl.int16)) + v, mask=inside, other=PLACES).to(tl.int32)
        chosen = inside & (group < PLACES)
        first = row * (PLACES + 1)
        plain = tl.load(sums + first.to(tl.int64) * COLUMNS + column, mask=inside, other=1.0)
        joint = tl.load(sums + (first + 1 + group).to(tl.int64) * COLUMNS + column, mask=chosen, other=1.0)
        top = tl.load(tops + first + 1 + group, mask=chosen, other=-float("inf"))
        possible = top > -float("inf")
        suspect = (inside & (plain < LEAST)) | (possible & (joint < LEAST))
        if tl.max(suspect.to(tl.int32), 0) > 0:
            tl.store(found, 1)
        log_prob = tl.where(possible, tl.log(joint) + top - tl.log(plain) - tl.load(tops + first), -float("inf"))
        result = _steer(score, log_prob, WEIGHT)
    tl.store(steered + row.to(tl.int64) * WIDTH + v, result, mask=v < WIDTH)
    result = tl.where(v < WIDTH, result, -float("inf"))
    score = tl.where(v < WIDTH, score, -float("inf"))
    top, most = tl.max(result, 0), tl.max(score, 0)
    mass = tl.sum(tl.exp(result - tl.where(top == -float("inf"), 0.0, top)), 0)
    same = tl.max(((result == top) & (score == most)).to(tl.float32), 0)
    _store_summary(summaries, row * ENTRIES + tl.program_id(1), top, mass, most, same)


@triton.jit
def alone_kernel(
    packet,
    log_emission,
    steered,
    summaries,
    STATES,
    WORDS,
    WIDTH,
    WEIGHT,
    ENTRIES,
    KIND: tl.constexpr,
    MOST_PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some programs per row: steered scores of the tokens that are scored alone, from sums in log space."""
    row = tl.program_id(0).to(tl.int64)
    at = packet + _HEADER + row * _OF_ROW
    table_of_row, plan = _floats(tl.load(at + 3)), _integers(tl.load(at + 4))
    count = tl.load(plan, mask=tl.load(at + 2) != 0, other=0).to(tl.int32)
    states = _floats(tl.load(packet + 2)) + row * STATES
    top, most, mass, same = -float("inf"), -float("inf"), 0.0, 0.0
    for number in range(tl.program_id(1), count, tl.num_programs(1)):
        pair = plan + 1 + MOST_PLACES + 2 * number
        token, table = tl.load(pair), table_of_row + tl.load(pair + 1) * STATES
        low = tl.full([BLOCK], -float("inf"), tl.float32)
        high = tl.full([BLOCK], -float("inf"), tl.float32)
        for first in range(0, STATES, BLOCK):
            z = first + tl.arange(0, BLOCK)
            inside = z < STATES
            plain = tl.load(states + z, mask=inside, other=-float("inf"))
            plain += tl.load(log_emission + z.to(tl.int64) * WORDS + token, mask=inside, other=-float("inf"))
            low = tl.maximum(low, plain)
            high = tl.maximum(high, plain + tl.load(table + z, mask=inside, other=-float("inf")))
        low_top, high_top = tl.max(low, 0), tl.max(high, 0)
        log_prob = -float("inf")
        if high_top > -float("inf"):
            low_sum = tl.zeros([BLOCK], tl.float32)
            high_sum = tl.zeros([BLOCK], tl.float32)
            for first in range(0, STATES, BLOCK):
                z = first + tl.arange(0, BLOCK)
                inside = z < STATES
                plain = tl.load(states + z, mask=inside, other=-float("inf"))
                plain += tl.load(log_emission + z.to(tl.int64) * WORDS + token, mask=inside, other=-float("inf"))
                low_sum += tl.exp(plain - low_top)
                high_sum += tl.exp(plain + tl.load(table + z, mask=inside, other=-float("inf")) - high_top)
            log_prob = tl.log(tl.sum(high_sum, 0)) + high_top - tl.log(tl.sum(low_sum, 0)) - low_top
        score = tl.load(tl.load(packet).to(tl.pointer_type(KIND)) + row * WIDTH + token).to(tl.float32)
        value = _steer(score, log_prob, WEIGHT)
        tl.store(steered + row * WIDTH + token, value)
        same = tl.where((value > top) | (score > most), 0.0, same)
        if value > -float("inf"):
            higher = tl.maximum(top, value)
            mass = mass * tl.exp(top - higher) + tl.exp(value - higher)
            top = higher
        most = tl.maximum(most, score)
        same = tl.where((value == top) & (score == most), 1.0, same)
    _store_summary(summaries, (row + 1) * ENTRIES - tl.num_programs(1) + tl.program_id(1), top, mass, most, same)


@triton.jit
def finish_kernel(
    packet,
    steered,
    summaries,
    found,
    WIDTH,
    ENTRIES: tl.constexpr,
    ENTRIES_WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and block of tokens: normalize, by a mass that is stored."""
    row = tl.program_id(0)
    entry = tl.arange(0, ENTRIES_WIDTH)
    at, there = summaries + (row * ENTRIES + entry).to(tl.int64) * 4, entry < ENTRIES
    tops = tl.load(at, mask=there, other=-float("inf"))
    befores = tl.load(at + 2, mask=there, other=-float("inf"))
    top, most = tl.max(tops, 0), tl.max(befores, 0)
    shares = tl.where(tops == -float("inf"), 0.0, tl.load(at + 1, mask=there, other=0.0) * tl.exp(tops - top))
    mass = tl.sum(shares, 0)
    constrained = tl.load(packet + _HEADER + row * _OF_ROW + 2) != 0
    shift = tl.where(constrained, top + tl.log(mass), 0.0)
    if tl.program_id(1) == 0:
        tl.store(_floats(tl.load(packet + 3)) + row, shift)
        if constrained:
            if (mass >= 1.0) == 0:  # or NaN: every token is impossible
                tl.store(found, 1)
            same = (tops == top) & (befores == most) & (tl.load(at + 3, mask=there, other=0.0) > 0.0)
            if tl.max(same.to(tl.int32), 0) == 0:
                tl.store(found + 1 + row, 1)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = tl.load(packet + 1).to(tl.pointer_type(KIND)) + row.to(tl.int64) * WIDTH
    value = tl.load(steered + row.to(tl.int64) * WIDTH + v, mask=v < WIDTH, other=0.0) - shift
    tl.store(out + v, value.to(KIND), mask=v < WIDTH)
