"""Compare two models on the same texts: paired differences with a bootstrap interval."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hmmlm.errors import InputError
from hmmlm.ops.pieces import at_once

RESAMPLES = 4_000


class Difference(NamedTuple):
    """A difference per unit, and the 95% interval of the paired bootstrap over texts."""

    mean: float
    low: float
    high: float


def paired_difference(first: np.ndarray, second: np.ndarray, sizes: np.ndarray, seed: int = 0) -> Difference:
    """Return (Σ first − Σ second) / Σ sizes, with its interval under resampling of texts.

    Args:
        first, second: [N] a total per text, of each model.
        sizes: [N] units per text, such as bytes or tokens.
    """
    if len(sizes) < 2:
        raise InputError("an interval needs at least two texts: give a text of several lines")
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    generator, means = np.random.default_rng(seed), []
    rows = at_once(len(sizes), 2**22)
    for begin in range(0, RESAMPLES, rows):
        chosen = generator.integers(len(sizes), size=(min(rows, RESAMPLES - begin), len(sizes)))
        means.append(differences[chosen].sum(1) / sizes[chosen].sum(1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return Difference(float(differences.sum() / sizes.sum()), float(low), float(high))
