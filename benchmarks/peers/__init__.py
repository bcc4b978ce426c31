"""The systems measured, one module each.

A module has `VERSION`, `DTYPE` and `tasks(problem)`. For each operation that the system offers, `tasks` returns a
function that prepares it (and compiles it, if applicable) and returns a `Task`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Task(NamedTuple):
    """One operation of one system, ready to be timed."""

    run: Callable[[], Any]  # timed; returns when the result is complete
    result: Callable[[Any], np.ndarray] | None = None  # converts it for benchmarks.problem.disagreement; not timed


Tasks = dict[str, Callable[[], Task]]

# Module of each system, in the order of the tables and legends.
SYSTEMS = {
    "hmmlm": "ours",
    "bare products": "bare",
    "autograd loop": "loop",
    "dynamax": "dynamax",
    "dynamax, functions": "dynamax_functions",
    "pomegranate": "pomegranate",
    "hmmlearn": "hmmlearn",
    "hmmlearn, scaling": "hmmlearn_scaling",
}
