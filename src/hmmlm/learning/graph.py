"""A training step as one CUDA graph: what a step launches is recorded once and then replayed.

A step is a few hundred small kernels, and launching them from Python takes several times longer than they run. A graph
needs the same shapes every time and nothing that waits for the device; batches that do not fit (the last of an epoch)
are left to the caller.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hmmlm.data.batches import Batch
from hmmlm.hmm import Carry
from hmmlm.ops.graph import record

WARM_UP = 3  # eager steps before recording, as CUDA graphs require: libraries and kernels initialize themselves

Learn = Callable[[Batch, Carry | None], Any]
"""One eager step: batch and carry in, a result with a carry out."""


class GraphedStep:
    """Replays `learn` for batches of one shape, which are given on the CPU."""

    def __init__(self, learn: Learn, device: torch.device) -> None:
        self.learn, self.device = learn, device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0
        self.stream = torch.cuda.Stream()

    def __call__(self, batch: Batch, carry: Carry | None) -> Any:
        """Run `learn`; return None if this batch cannot be replayed."""
        if carry is not None and self.graph is not None and self.carry is None:
            self.graph = None  # recorded from the first batch of an epoch, which has no carry: record again
        if not self.fits(batch, carry):
            return None
        if self.graph is None:
            if self.done < WARM_UP:
                self.done += 1
                return self.run_eagerly(batch.to(self.device), carry)
            self.record(batch.to(self.device), carry)
        self.fill(batch, carry)
        assert self.graph is not None
        self.graph.replay()
        return self.result

    def fits(self, batch: Batch, carry: Carry | None) -> bool:
        """Return whether the graph can be recorded from, or replayed for, this batch."""
        if batch.lengths is not None or batch.labels is not None:
            return False
        if self.graph is None:
            return carry is not None or not batch.carry
        return batch.tokens.shape == self.batch.tokens.shape

    def run_eagerly(self, batch: Batch, carry: Carry | None) -> Any:
        """Run off the main stream, so that nothing that is set up belongs to that stream."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self.learn(batch, carry)
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def record(self, batch: Batch, carry: Carry | None) -> None:
        """Capture one step into the graph; the step ends by copying its carry to where the next replay reads it."""
        if carry is not None and batch.restart is None:
            batch = batch._replace(restart=torch.zeros_like(batch.tokens, dtype=torch.bool))
        self.batch, self.carry = batch, None if carry is None else carry.clone()

        def launch() -> Any:
            result = self.learn(self.batch, self.carry)
            if self.carry is None:
                return result
            self.carry.copy_(result.carry)
            return result._replace(carry=self.carry)

        gc.collect()  # the memory of an earlier run
        self.graph, self.result = record(launch)

    def fill(self, batch: Batch, carry: Carry | None) -> None:
        """Copy a batch to where the graph reads. The first of an epoch has no carry: it restarts at position 0."""
        _send(batch.tokens, self.batch.tokens)
        if self.batch.next_words is not None and batch.next_words is not None:
            _send(batch.next_words, self.batch.next_words)
        if self.batch.restart is not None:
            if batch.restart is None:
                self.batch.restart.zero_()
            else:
                _send(batch.restart, self.batch.restart)
            if carry is None:
                self.batch.restart[:, 0] = True
        if carry is not None and self.carry is not None:
            self.carry.copy_(carry)


def _send(value: Tensor, to: Tensor) -> None:
    """Copy a tensor of the CPU to the device without waiting for the work that the device still has to do.

    A copy of more than 64 KB from ordinary memory waits for it, and a GPU is then idle until the next step is launched.
    """
    to.copy_(value.pin_memory() if to.is_cuda else value, non_blocking=True)
