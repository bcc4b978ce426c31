"""Baum-Welch: the M step, and mini-batch updates θ ← α θ_new + (1 − α) θ from a running average of expected counts.

With the counts of a whole corpus and no pseudocounts, an update never lowers its likelihood, for any α in (0, 1]: the
expected complete log-likelihood is concave in the probabilities, so every point between θ and its maximum is better
than θ. (Over streams this holds except at window boundaries, since a window's posterior does not see later windows.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hmmlm.distributed.ranks import world
from hmmlm.ops.maximize_rows import maximize_rows
from hmmlm.runs.checkpoint import load_tensors


@torch.no_grad()
def maximize(
    counts: Mapping[str, Tensor],
    current: Mapping[str, Tensor],
    pseudocount: float = 0.0,
    step: float = 1.0,
    out: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Take the M step of each table from its expected counts, `step` of the way: α θ_new + (1 − α) θ, as probabilities.

    A row without any count (a state never visited) keeps its current distribution.

    Args:
        out: where to write the result.
    """
    return {
        name: maximize_rows(counts[name], log_probs, pseudocount, step, None if out is None else out[name].data)
        for name, log_probs in current.items()
    }


class RunningCounts:
    """The sum of expected counts for one update, and its running average over updates (momentum).

    Of several processes, each adds the counts of its rows of a batch; they are summed for an update.
    """

    def __init__(self, tables: Mapping[str, Tensor], momentum: float) -> None:
        """Create counts of the shapes of `tables`, on their device."""
        self.momentum = momentum
        self.sum = {name: torch.zeros_like(table.data) for name, table in tables.items()}
        self.mean = {name: torch.zeros_like(table.data) for name, table in tables.items()} if momentum else {}
        self.updates = 0

    def add(self, *counts: Tensor) -> None:
        """Add a batch's counts, in the order of the tables."""
        for total, own in zip(self.sum.values(), counts, strict=True):
            total += own

    @contextmanager
    def take(self) -> Iterator[dict[str, Tensor]]:
        """Yield the counts for an update, and then start the next sum.

        The average is divided by 1 − momentum^updates, so that pseudocounts do not dominate the first updates.
        """
        self.updates += 1
        world().sum_(self.sum.values())
        if self.momentum:
            for name, mean in self.mean.items():
                mean.lerp_(self.sum[name], 1 - self.momentum)
            correction = 1 - self.momentum**self.updates
            yield {name: mean / correction for name, mean in self.mean.items()}
        else:
            yield self.sum
        for total in self.sum.values():
            total.zero_()

    def collect(self) -> None:
        """Move the counts of all processes to rank 0, whose sum is then that of all, as one process would have it."""
        world().sum_(self.sum.values())
        self._keep_in_first()

    def _keep_in_first(self) -> None:
        if not world().first:
            for total in self.sum.values():
                total.zero_()

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the counts and the number of updates, as a checkpoint stores them."""
        sums = {f"sum.{name}": tensor for name, tensor in self.sum.items()}
        return sums | {f"mean.{name}": tensor for name, tensor in self.mean.items()}, {"updates": self.updates}

    def load(self, folder: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, from the checkpoint in `folder`."""
        load_tensors(folder, tensors, "optimizer.", self.state_dict()[0])
        self.updates = int(values["updates"])
        self._keep_in_first()

    def advice(self, rate: float) -> str:
        return "set optimizer.pseudocount above 0, or lower optimizer.step"
