"""Probabilities that underflow: what is set to zero, and how little of a sum may be lost.

Every recursion in probabilities sets values below FLOOR to zero. Three bounds decide whether that may have changed a
result by more than TOLERANCE; where it may have, the result is "suspect" and is computed again in log space:

- A sum of products of n values of which each may be lost is sure from `least_sum` on: queries, constraints, and the
  upper bound of the dense scan.
- `hmmlm.scan.generic_filter` follows what each state lacks through the steps, and so do the kernels of blocked models
  (`hmmlm.ops.blocked_scan.problem.Limits`).
- The dense scan bounds the loss by the least mass of a step and by how much a column of the transition varies
  (`hmmlm.ops.scan.scaled.suspect_by_ratio`).
"""

import math

import torch
from torch import Tensor

FLOOR = {torch.float32: 1e-36, torch.float64: 1e-300}
"""Scaled probabilities below this value count as underflowed."""
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
"""The share of a sum that may be lost."""
LIFT = {torch.float32: 1e30, torch.float64: 1e280}
"""Emission probabilities are relative to the largest of their row, times this: they underflow far below FLOOR."""


def least_sum(n: int, dtype: torch.dtype, floor: float | None = None) -> float:
    """Return the least sum of n values of which each may lack FLOOR (or `floor`) that is accurate to TOLERANCE."""
    return (FLOOR[dtype] if floor is None else floor) * n / TOLERANCE[dtype]


def flush(values: Tensor) -> Tensor:
    """Set values below FLOOR to zero: denormal numbers would be slow and inaccurate."""
    return torch.nn.functional.threshold(values, FLOOR[values.dtype], 0.0)


def exp(scores: Tensor) -> Tensor:
    """Compute exp(scores); on the CPU, set results below FLOOR to zero.

    Denormal numbers are a hundred times slower on CPUs.
    """
    lowest = math.log(FLOOR[scores.dtype])
    if scores.is_cuda or not scores.numel() or bool(scores.amin() >= lowest):
        return scores.exp()
    return scores.clamp_min(lowest).exp_().masked_fill_(scores < lowest, 0.0)
