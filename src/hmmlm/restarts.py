"""The best of several random starts: how training and `HMM` choose among them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def best_of(attempt: Callable[[int], T], score: Callable[[T], float], restarts: int, seed: int) -> T:
    """Return the result with the highest score of `restarts` attempts, with the seeds seed, seed + 1, …

    The first of equal scores wins, and any number beats NaN.
    """
    best = attempt(seed)
    highest = score(best)
    for other in range(seed + 1, seed + restarts):
        result = attempt(other)
        found = score(result)
        if found > highest or (math.isnan(highest) and not math.isnan(found)):
            best, highest = result, found
    return best
