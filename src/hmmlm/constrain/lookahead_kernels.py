"""GPU kernels of the recursion of a guide (see constrain/lookahead.py): two and a product for each token."""
# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers)

import triton
import triton.language as tl


@triton.jit
def edges_kernel(probs, offset, weights, first, edge, from_row, total, top, STATES, BLOCK: tl.constexpr):
    """One program per row and block of states: total = Σ_edges weights · probs · exp(offset − top), top the largest.

    The edges of a row are first[row] up to first[row + 1].
    """
    row = tl.program_id(0)
    z = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = z < STATES
    begin, end = tl.load(first + row), tl.load(first + row + 1)
    most = tl.load(offset + tl.load(from_row + begin))
    for k in range(begin + 1, end):
        most = tl.maximum(most, tl.load(offset + tl.load(from_row + k)))
    result = tl.zeros([BLOCK], tl.float32)
    for k in range(begin, end):
        source = tl.load(from_row + k)
        factor = tl.exp((tl.load(offset + source) - most).to(tl.float32))
        value = tl.load(probs + source * STATES + z, mask=inside, other=0.0)
        result += value * tl.load(weights + tl.load(edge + k) * STATES + z, mask=inside, other=0.0) * factor
    tl.store(total + row.to(tl.int64) * STATES + z, result, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(top + row, most)


@triton.jit
def divide_kernel(moved, offset, probs, log_probs, suspect, STATES, LEAST, BLOCK: tl.constexpr):
    """One program per row: divide moved by its largest value, which is added to the offset."""
    row = tl.program_id(0).to(tl.int64)
    moved += row * STATES
    high = tl.zeros([BLOCK], tl.float32)
    low = tl.full([BLOCK], float("inf"), tl.float32)
    for first in range(0, STATES, BLOCK):
        z = first + tl.arange(0, BLOCK)
        inside = z < STATES
        value = tl.load(moved + z, mask=inside, other=0.0)
        high = tl.maximum(high, value)
        low = tl.minimum(low, tl.where(inside, value, float("inf")))
    peak = tl.max(high, 0)
    if (tl.min(low, 0) >= LEAST) == 0:  # or NaN
        tl.store(suspect, 1)
    at = tl.load(offset + row) + tl.log(peak.to(tl.float64))
    tl.store(offset + row, at)
    for first in range(0, STATES, BLOCK):
        z = first + tl.arange(0, BLOCK)
        inside = z < STATES
        value = tl.load(moved + z, mask=inside, other=1.0) / peak
        tl.store(probs + row * STATES + z, value, mask=inside)
        tl.store(log_probs + row * STATES + z, (tl.log(value).to(tl.float64) + at).to(tl.float32), mask=inside)
