"""Kernels of softmax rows: probabilities from logits, and the gradient of the logits from that of the probabilities.

One program per row. It reads its row twice, the second time from the cache.
"""
# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers)

import triton
import triton.language as tl


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
