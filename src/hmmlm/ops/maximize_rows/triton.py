"""The M step in one kernel: counts are read twice, the second time partly from the cache, and all else once."""
# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers)

import triton
import triton.language as tl
from torch import Tensor

_TINY = tl.constexpr(1.1754944e-38)  # smallest normal float32
_BLOCK = 4096


@triton.jit
def maximize_kernel(
    counts,
    log_probs,
    out,
    COLUMNS,
    pseudocount,
    pseudocounts,
    step,
    PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row; `pseudocounts` is the sum of all of a row's."""
    begin = tl.program_id(0).to(tl.int64) * COLUMNS
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        sums += tl.load(counts + begin + column, mask=column < COLUMNS, other=0.0)
    total = tl.sum(sums, 0)
    empty = total <= 0
    total = tl.where(empty, 1.0, total + pseudocounts)
    for first in range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < COLUMNS
        old = tl.load(log_probs + begin + column, mask=inside, other=0.0)
        new = (tl.load(counts + begin + column, mask=inside, other=0.0) + pseudocount) / total
        if PARTIAL:
            before = tl.exp(old)
            new = before + step * (new - before)
        zero = new < _TINY  # not true of NaN, which has to remain
        new = tl.where(zero, -float("inf"), tl.log(tl.where(zero, 1.0, new)))
        tl.store(out + begin + column, tl.where(empty, old, new), mask=inside)


def maximize_rows(counts: Tensor, log_probs: Tensor, pseudocount: float, step: float, out: Tensor) -> None:
    """Write the result to `out`."""
    columns = counts.shape[-1]
    block = min(_BLOCK, triton.next_power_of_2(columns))
    maximize_kernel[(counts.numel() // columns,)](
        counts,
        log_probs,
        out,
        columns,
        float(pseudocount),
        float(pseudocount * columns),
        float(step),
        PARTIAL=step < 1,
        BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
    )
