"""Kernels of triton.py. Position n indexes [B, span], a range of time that starts at `first`."""
# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers)

import triton
import triton.language as tl

from hmmlm.ops.blocked_scan.problem import ENTRY, START

_START, _ENTRY = tl.constexpr(START), tl.constexpr(ENTRY)


@triton.jit
def tiles_kernel(
    u,
    w,
    log_normalizer,
    source,
    block,
    tiles,
    first,
    span,
    TIME,
    KEPT: tl.constexpr,
    H: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per position n and part of its tile: tiles[n, i, j] = A[state i of source, state j of block]."""
    n = tl.program_id(0).to(tl.int64)
    at = (n // span) * TIME + first + n % span
    group = tl.load(source + at)
    if group >= 0:
        row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column = tl.program_id(2) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        own = tl.load(block + at)
        scores = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for start in range(0, H, BLOCK_H):
            inner = start + tl.arange(0, BLOCK_H)
            a = tl.load(
                u + (group * KEPT + row)[:, None] * H + inner[None, :],
                mask=(row < KEPT)[:, None] & (inner < H)[None, :],
                other=0.0,
            )
            b = tl.load(
                w + (own * KEPT + column)[None, :] * H + inner[:, None],
                mask=(column < KEPT)[None, :] & (inner < H)[:, None],
                other=0.0,
            )
            scores = tl.dot(a, b, scores, input_precision=PRECISION)
        shift = tl.load(log_normalizer + group * KEPT + row, mask=row < KEPT, other=0.0)
        values = tl.exp(scores - shift[:, None])
        tl.store(
            tiles + n * KEPT * KEPT + row[:, None] * KEPT + column[None, :],
            values.to(tiles.dtype.element_ty),
            mask=(row < KEPT)[:, None] & (column < KEPT)[None, :],
        )


@triton.jit
def _begun(log_start, entry, block, source, b, at, column, KEPT: tl.constexpr):
    """Return log p(z) [WIDTH] of a position that is no step: of the start, or of the entry of sequence b."""
    inside, entering = column < KEPT, tl.load(source + at) == _ENTRY
    row = tl.where(entering, b, tl.load(block + at))
    start = tl.load(log_start + row * KEPT + column, mask=inside & (entering == 0), other=-float("inf"))
    return tl.maximum(start, tl.load(entry + row * KEPT + column, mask=inside & entering, other=-float("inf")))


@triton.jit
def forward_kernel(
    tiles,
    word,
    block,
    source,
    lengths,
    log_start,
    log_emission,
    entry,
    filtered,
    predicted,
    log_likelihood,
    suspect,
    first,
    end,
    TIME,
    FLOOR,
    SUSPICIOUS,
    KEPT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per sequence: run the filter. Each step reads the previous filtered distribution from memory."""
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < KEPT
    total = tl.load(log_likelihood + b, mask=first > 0, other=0.0)
    dead = tl.load(suspect + b, mask=first > 0, other=0).to(tl.int32)
    for t in range(first, tl.minimum(end, tl.load(lengths + b).to(tl.int32))):
        at = b * TIME + t
        emission = tl.load(log_emission + tl.load(word + at) * KEPT + column, mask=inside, other=-float("inf"))
        if tl.load(source + at) < 0:
            scores = emission + _begun(log_start, entry, block, source, b, at, column, KEPT)
            reached = tl.full([WIDTH], 1.0, tl.float32)
        else:
            scores = emission
            tile = tiles + (b * (end - first) + t - first) * KEPT * KEPT
            sums = tl.zeros([CHUNK, WIDTH], tl.float32)
            for top in tl.range(0, KEPT, CHUNK, num_stages=STAGES):
                row = top + tl.arange(0, CHUNK)
                f = tl.load(filtered + (b * (TIME + 1) + t) * KEPT + row, mask=row < KEPT, other=0.0)
                mask = (row < KEPT)[:, None] & inside[None, :]
                a = tl.load(tile + row[:, None] * KEPT + column[None, :], mask=mask, other=0.0)
                sums += f[:, None] * a.to(tl.float32)
            reached = tl.sum(sums, 0)
            reached = tl.where(reached < FLOOR, 0.0, reached)
            tl.store(predicted + at * KEPT + column, reached, mask=inside)
        shift = tl.max(scores, 0)
        shift = tl.where(shift == -float("inf"), 0.0, shift)
        weight = tl.exp(scores - shift) * reached
        mass = tl.sum(weight, 0)
        dead = tl.where(mass >= SUSPICIOUS, dead, 1)
        mass = tl.where(dead > 0, 1.0, mass)
        total += tl.log(mass) + shift
        f = tl.where(dead > 0, 0.0, weight / mass)
        tl.store(filtered + (b * (TIME + 1) + t + 1) * KEPT + column, f, mask=inside)
        tl.debug_barrier()  # the next step reads what all threads wrote
    tl.store(log_likelihood + b, tl.where(dead > 0, -float("inf"), total))
    tl.store(suspect + b, dead.to(tl.int8))


@triton.jit
def stray_kernel(
    tiles,
    word,
    block,
    source,
    lengths,
    log_start,
    log_emission,
    entry,
    predicted,
    stray,
    suspect,
    first,
    end,
    TIME,
    FLOOR,
    LOST,
    TINY,
    SURE,
    TOLERATED,
    KEPT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per sequence: bound the mass that `forward_kernel` may have lost (see `Limits`).

    Step t reads stray[b, t % 2] and writes stray[b, (t + 1) % 2].
    """
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < KEPT
    dead = tl.load(suspect + b).to(tl.int32)
    for t in range(first, tl.minimum(end, tl.load(lengths + b).to(tl.int32))):
        at = b * TIME + t
        scores = tl.load(log_emission + tl.load(word + at) * KEPT + column, mask=inside, other=-float("inf"))
        reached = tl.full([WIDTH], 1.0, tl.float32)
        strayed = tl.zeros([WIDTH], tl.float32)
        if tl.load(source + at) < 0:
            scores += _begun(log_start, entry, block, source, b, at, column, KEPT)
        else:
            tile = tiles + (b * (end - first) + t - first) * KEPT * KEPT
            sums = tl.zeros([CHUNK, WIDTH], tl.float32)
            for top in tl.range(0, KEPT, CHUNK, num_stages=STAGES):
                row = top + tl.arange(0, CHUNK)
                s = tl.load(stray + (2 * b + t % 2) * KEPT + row, mask=row < KEPT, other=0.0)
                mask = (row < KEPT)[:, None] & inside[None, :]
                a = tl.load(tile + row[:, None] * KEPT + column[None, :], mask=mask, other=0.0)
                sums += s[:, None] * a.to(tl.float32)
            reached = tl.load(predicted + at * KEPT + column, mask=inside, other=0.0)
            strayed = tl.sum(sums, 0) + tl.where(reached < SURE, 2 * FLOOR, 0.0)
        shift = tl.max(scores, 0)
        relative = tl.exp(scores - tl.where(shift == -float("inf"), 0.0, shift))
        mass = tl.sum(relative * reached, 0)
        strayed = tl.maximum((relative * strayed + 2 * TINY) / mass, LOST)
        strayed = tl.where(inside, strayed, 0.0)
        dead = tl.where(tl.sum(strayed, 0) <= TOLERATED, dead, 1)
        tl.store(stray + (2 * b + (t + 1) % 2) * KEPT + column, strayed, mask=inside)
        tl.debug_barrier()  # the next step reads what all threads wrote
    tl.store(suspect + b, dead.to(tl.int8))


@triton.jit
def backward_kernel(
    tiles,
    source,
    lengths,
    grad,
    filtered,
    predicted,
    posterior,
    ratio,
    extra,
    grad_initial,
    first,
    end,
    TIME,
    EXTRA: tl.constexpr,
    KEPT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per sequence: posterior[b, t + 1] of position t times grad, ratio[b, t] = posterior / predicted.

    `extra` is added to the posterior in the ratio alone.
    """
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < KEPT
    weight = tl.load(grad + b)
    length = tl.load(lengths + b).to(tl.int32)
    last = tl.minimum(end, length) - 1
    for step in range(last - first + 1):
        t = last - step
        at = b * TIME + t
        slot = (b * (TIME + 1) + t + 1) * KEPT
        following = tl.load(source + at + 1, mask=t + 1 < length, other=_START)
        if following < 0:  # no later position depends on this one
            gamma = weight * tl.load(filtered + slot + column, mask=inside, other=0.0)
            tl.store(posterior + slot + column, gamma, mask=inside)
        else:
            gamma = tl.load(posterior + slot + column, mask=inside, other=0.0)
        if EXTRA:
            gamma += tl.load(extra + slot + column, mask=inside, other=0.0)
        if tl.load(source + at) >= 0:
            q = tl.load(predicted + at * KEPT + column, mask=inside, other=0.0)
            r = tl.where(q > 0, gamma / tl.where(q > 0, q, 1.0), 0.0)
            tl.store(ratio + at * KEPT + column, r, mask=inside)
            tile = tiles + (b * (end - first) + t - first) * KEPT * KEPT
            for top in tl.range(0, KEPT, CHUNK, num_stages=STAGES):
                row = top + tl.arange(0, CHUNK)
                mask = (row < KEPT)[:, None] & inside[None, :]
                a = tl.load(tile + row[:, None] * KEPT + column[None, :], mask=mask, other=0.0)
                ahead = tl.sum(a.to(tl.float32) * r[None, :], 1)
                f = tl.load(filtered + slot - KEPT + row, mask=row < KEPT, other=0.0)
                tl.store(posterior + slot - KEPT + row, f * ahead, mask=row < KEPT)
                if t == 0:
                    tl.store(grad_initial + b * KEPT + row, ahead, mask=row < KEPT)
        tl.debug_barrier()  # the next step reads what all threads wrote


@triton.jit
def _piece(offsets, g, PIECE: tl.constexpr):
    """Return the number of pieces of segment g; an empty segment has one piece, which writes zeros."""
    count = tl.load(offsets + g + 1) - tl.load(offsets + g)
    return tl.maximum((count + PIECE - 1) // PIECE, 1)


@triton.jit
def factor_kernel(
    order,
    offsets,
    tiles,
    own_vector,
    own_batch,
    other_vector,
    other_batch,
    other_group,
    other_factor,
    out,
    pieces,
    first,
    span,
    TIME,
    own_stride,
    other_stride,
    ADD: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
    H: tl.constexpr,
    PRECISION: tl.constexpr,
    PIECE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_WIDTH: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_OTHER: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per piece and part of the factor: Σ_n Σ_j ξ_n(i, j) · factor[group of n, j] over its positions n.

    The posterior of pairs is ξ_n(i, j) = own_i · tile_n(i, j) · other_j. Serves U (own: rows of the tile) and W (own:
    columns of the tile). The sum goes to `out` if the piece is the whole segment, else to `pieces`.
    """
    piece = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_WIDTH)
    counts = tl.load(offsets + group + 1, mask=group < GROUPS, other=0)
    counts -= tl.load(offsets + group, mask=group < GROUPS, other=0)
    n_pieces = tl.where(group < GROUPS, tl.maximum((counts + PIECE - 1) // PIECE, 1), 0)
    ends = tl.cumsum(n_pieces, 0)
    g = tl.sum((ends <= piece).to(tl.int64), 0)  # the segment of this piece
    if g < GROUPS:
        before = piece - tl.sum(tl.where(group < g, n_pieces, 0), 0)
        begin = tl.load(offsets + g) + before * PIECE
        end = tl.minimum(begin + PIECE, tl.load(offsets + g + 1))
        own = tl.program_id(1) * BLOCK_OWN + tl.arange(0, BLOCK_OWN)
        inner = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
        total = tl.zeros([BLOCK_OWN, BLOCK_H], tl.float32)
        for k in range(begin, end):
            n = tl.load(order + k)
            b, t = n // span, first + n % span
            far = tl.load(other_group + b * TIME + t)
            if far >= 0:  # not a start
                x = tl.load(own_vector + b * own_batch + t * OWN + own, mask=own < OWN, other=0.0)
                for start in range(0, OTHER, BLOCK_OTHER):
                    other = start + tl.arange(0, BLOCK_OTHER)
                    y = tl.load(other_vector + b * other_batch + t * OTHER + other, mask=other < OTHER, other=0.0)
                    a = tl.load(
                        tiles + n * OWN * OTHER + own[:, None] * own_stride + other[None, :] * other_stride,
                        mask=(own < OWN)[:, None] & (other < OTHER)[None, :],
                        other=0.0,
                    )
                    factor = tl.load(
                        other_factor + (far * OTHER + other)[:, None] * H + inner[None, :],
                        mask=(other < OTHER)[:, None] & (inner < H)[None, :],
                        other=0.0,
                    )
                    weighted = (a.to(tl.float32) * y[None, :]).to(factor.dtype)
                    # Multiply by own_i after the product: using the product makes the compiler wait for it. Otherwise
                    # it could still read registers to which the next iteration writes `weighted`.
                    total += x[:, None] * tl.dot(weighted, factor, input_precision=PRECISION)
        at = own[:, None] * H + inner[None, :]
        mask = (own < OWN)[:, None] & (inner < H)[None, :]
        if _piece(offsets, g, PIECE) == 1:
            if ADD:
                total += tl.load(out + g * OWN * H + at, mask=mask, other=0.0)
            tl.store(out + g * OWN * H + at, total, mask=mask)
        else:
            tl.store(pieces + piece * OWN * H + at, total, mask=mask)


@triton.jit
def pieces_kernel(
    offsets,
    pieces,
    out,
    ADD: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_WIDTH: tl.constexpr,
):
    """One program per segment g and range of elements: out[g] = sum of its pieces, if it has several."""
    g = tl.program_id(0).to(tl.int64)
    n_pieces = _piece(offsets, g, PIECE)
    if n_pieces > 1:
        group = tl.arange(0, GROUPS_WIDTH)
        counts = tl.load(offsets + group + 1, mask=group < g, other=0)
        counts -= tl.load(offsets + group, mask=group < g, other=0)
        first = tl.sum(tl.where(group < g, tl.maximum((counts + PIECE - 1) // PIECE, 1), 0), 0)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        if ADD:
            total += tl.load(out + g * SIZE + at, mask=at < SIZE, other=0.0)
        for piece in range(first, first + n_pieces):
            total += tl.load(pieces + piece * SIZE + at, mask=at < SIZE, other=0.0)
        tl.store(out + g * SIZE + at, total, mask=at < SIZE)


@triton.jit
def segment_kernel(
    order,
    offsets,
    source,
    values,
    out,
    first,
    span,
    TIME,
    sign,
    ADD: tl.constexpr,
    STARTS: tl.constexpr,
    SLOT: tl.constexpr,
    KEPT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per segment g: out[g] = sign · Σ values[b, t + SLOT] over its positions (b, t), or its STARTS."""
    g = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < KEPT
    total = tl.zeros([WIDTH], tl.float32)
    if ADD:
        total += tl.load(out + g * KEPT + column, mask=inside, other=0.0)
    end = tl.load(offsets + g + 1)
    for begin in range(tl.load(offsets + g), end, CHUNK):
        k = begin + tl.arange(0, CHUNK)
        n = tl.load(order + k, mask=k < end, other=0)
        b, t = n // span, first + n % span
        wanted = k < end
        if STARTS:
            wanted = wanted & (tl.load(source + b * TIME + t, mask=wanted, other=0) == _START)
        at = (b * (TIME + 1) + t + SLOT) * KEPT
        found = tl.load(values + at[:, None] + column[None, :], mask=wanted[:, None] & inside[None, :], other=0.0)
        total += sign * tl.sum(found, 0)
    tl.store(out + g * KEPT + column, total, mask=inside)
