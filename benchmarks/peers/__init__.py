"""The systems measured, a module each.

A module has `VERSION`, `DTYPE` and `tasks(problem)`: for each operation it offers, a function that prepares it (also
compiles it, where there is something to compile) and returns a `Task`. Operations it does not offer are left out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Task(NamedTuple):
    run: Callable[[], Any]  # what is timed; ends when the result is there
    result: Callable[[Any], np.ndarray] | None = None  # its answer, for benchmarks.problem.disagreement; not timed


Tasks = dict[str, Callable[[], Task]]

# Module of each system, in the order of tables and legends.
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
