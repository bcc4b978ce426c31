"""Draws from log-distributions: single states or words, and whole paths backwards."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hmmlm.ops.pieces import at_once
from hmmlm.scan.lattice import Lattice


def draw_paths(lattice: Lattice, into: Tensor, paths: Tensor, generator: torch.Generator | None) -> None:
    """Draw a path backwards for each sequence, in NumPy, where a step over few states costs a third of its time.

    Args:
        lattice: over all states, on a CPU.
        into: [Z, Z] the transposed log A.
        paths: [num, B, T] is overwritten, but for what is beyond a length.
    """
    starts, columns, drawn = lattice.batch.starts, into.numpy(), paths.numpy()
    num, states, end = len(paths), np.empty((len(paths), 0), dtype=np.int64), len(lattice.filtered)
    most = at_once(num * into.shape[1], 2**22)  # rows whose noise is drawn together
    while end:
        first = end - 1
        while first and starts[end] - starts[first - 1] <= most:
            first -= 1
        values = lattice.filtered.whole[starts[first] : starts[end]].expand(num, -1, -1)
        scores = (values - _noise(values, generator).log_()).numpy()  # the exponential race, see `draw`
        for t in range(end - 1, first - 1, -1):
            own = scores[:, starts[t] - starts[first] : starts[t + 1] - starts[first]]
            own[:, : states.shape[1]] += columns[states]
            states = own.argmax(2)
            drawn[:, : states.shape[1], t] = states
        end = first


def draw(log_probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one index per row of log_probs [..., n], by the exponential race: argmin of Exp(1) / p."""
    return (log_probs - _noise(log_probs, generator).log_()).argmax(-1)


def _noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.empty_like(like).exponential_(generator=generator).clamp_min_(torch.finfo(like.dtype).tiny)
