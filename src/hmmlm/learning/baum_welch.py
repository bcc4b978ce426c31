"""Baum-Welch: the M step, and mini-batch updates θ ← α θ_new + (1 − α) θ from a running average of expected counts.

With the counts of a whole corpus and no pseudocounts, an update never lowers its likelihood, for any α in (0, 1]: the
expected complete log-likelihood is concave in the probabilities, so every point between θ and its maximum is better
than θ. (Over streams this holds but for the window boundaries, since a window's posterior does not see later windows.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from hmmlm.hmm import HMM


def maximise(
    start: Tensor, transition: Tensor, emission: Tensor, current: HMM, pseudocount: float = 0.0, step: float = 1.0
) -> HMM:
    """The M step from expected counts [Z], [Z,Z], [Z,V], taken `step` of the way: α θ_new + (1 − α) θ, probabilities.

    A row without any count (a state never visited) keeps its current distribution.
    """
    return HMM(
        _maximise_rows(start, current.log_start, pseudocount, step),
        _maximise_rows(transition, current.log_transition, pseudocount, step),
        _maximise_rows(emission, current.log_emission, pseudocount, step),
    )


def _maximise_rows(counts: Tensor, log_probs: Tensor, pseudocount: float, step: float) -> Tensor:
    """Log-probabilities [..., N] from counts [..., N]."""
    total = counts.sum(-1, keepdim=True)
    empty = total <= 0
    if pseudocount:
        counts, total = counts + pseudocount, total + pseudocount * counts.shape[-1]
    new = counts / total
    if step < 1:
        new = torch.lerp(log_probs.exp(), new, step)
    # Zeros (and numbers so small that they are as good as zero) are slow to take logarithms of, and there are many.
    tiny = torch.finfo(counts.dtype).tiny
    new = new.clamp_min(tiny).log_().masked_fill_(new < tiny, float("-inf"))
    # on a GPU, waiting to see whether there is any takes longer than doing it
    return torch.where(empty, log_probs, new) if counts.is_cuda or bool(empty.any()) else new


class RunningCounts:
    """Expected counts added up for one update, and their average over updates (momentum)."""

    NAMES = ("start", "transition", "emission")

    def __init__(self, states: int, vocab_size: int, momentum: float, device: torch.device) -> None:
        shapes = dict(zip(self.NAMES, ((states,), (states, states), (states, vocab_size)), strict=True))
        self.momentum = momentum
        self.sum = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
        self.mean = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()} if momentum else {}
        self.updates = 0

    def add(self, start: Tensor, transition: Tensor, emission: Tensor) -> None:
        """Add a batch's counts."""
        for total, counts in zip(self.sum.values(), (start, transition, emission), strict=True):
            total += counts

    def take(self) -> dict[str, Tensor]:
        """The counts for an update; begins the next sum.

        The average is divided by 1 − momentum^updates, so that the first updates are not drowned by pseudocounts.
        """
        self.updates += 1
        if self.momentum:
            for name, mean in self.mean.items():
                mean.lerp_(self.sum[name], 1 - self.momentum)
            correction = 1 - self.momentum**self.updates
            taken = {name: mean / correction for name, mean in self.mean.items()}
        else:
            taken = {name: total.clone() for name, total in self.sum.items()}
        for total in self.sum.values():
            total.zero_()
        return taken

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Named tensors that a checkpoint keeps."""
        yield from ((f"sum.{name}", tensor) for name, tensor in self.sum.items())
        yield from ((f"mean.{name}", tensor) for name, tensor in self.mean.items())


def batches_per_update(accumulate: int, growth: float, full_batch: bool, epoch: int, steps_per_epoch: int) -> int:
    """How many batches make one update in this epoch: growing batches, never more than the epoch has."""
    # in logarithms, since a power of many epochs overflows
    if full_batch or math.log(accumulate) + epoch * math.log(growth) >= math.log(steps_per_epoch):
        return steps_per_epoch
    return round(accumulate * growth**epoch)
