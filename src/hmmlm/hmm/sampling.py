"""Draws from log-distributions: single states or words, and whole paths backwards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_NOISE = 2**22  # largest table of scores of the states before each state
TABLED_STATES = 64  # of which such a table takes less time than a step in tensor operations


def draw_paths(filtered: Sequence[Tensor], into: Tensor, num: int, generator: torch.Generator | None) -> Tensor:
    """Draw paths [num, B, T] backwards, −1 beyond a length: of every step, first the state before each next one.

    Args:
        filtered: log p(z_t | x_1..t) [n, Z] of each step.
        into: [Z, Z] the transposed log A.
    """
    every, states = np.arange(num)[:, None], np.empty((num, 0), dtype=np.int64)
    paths = np.full((num, len(filtered[0]), len(filtered)), -1)
    size = max(1, _NOISE // (num * filtered[0].numel() * len(into)))  # of the steps that are drawn together
    for end in range(len(filtered), 0, -size):
        some = filtered[max(0, end - size) : end]
        values = torch.cat(list(some)).expand(num, -1, -1)
        noise = torch.empty_like(values).exponential_(generator=generator).clamp_min_(torch.finfo(values.dtype).tiny)
        scores = values - noise.log_()
        last, before = scores.argmax(2).cpu().numpy(), (scores[:, :, None] + into).argmax(3).cpu().numpy()
        stop = last.shape[1]
        for t, own in zip(range(end - 1, end - 1 - len(some), -1), reversed(some), strict=True):
            rows, begin = states.shape[1], stop - len(own)
            drawn = last[:, begin:stop].copy()
            drawn[:, :rows] = before[every, np.arange(begin, begin + rows), states]
            paths[:, : len(own), t] = states = drawn
            stop = begin
    return torch.from_numpy(paths)


def draw(log_probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one index per row of log_probs [..., n], by the exponential race: argmin of Exp(1) / p."""
    noise = torch.empty_like(log_probs).exponential_(generator=generator).clamp_min_(torch.finfo(log_probs.dtype).tiny)
    return (log_probs - noise.log()).argmax(-1)
