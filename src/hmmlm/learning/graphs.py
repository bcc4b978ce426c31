"""A training step as one CUDA graph: what a step launches is recorded once and then replayed.

At these sizes a step is a few hundred small kernels, and launching them from Python takes several times longer than
they run. A graph needs the same shapes every time and nothing that waits for the device; batches that do not fit
(the last of an epoch) are for the caller to do eagerly.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hmmlm.data.batches import Batch
from hmmlm.garbage import collector_paused
from hmmlm.hmm import Carry
from hmmlm.learning.evaluate import State

WARM_UP = 3  # eager steps before recording, as CUDA graphs ask for: libraries and kernels set themselves up

Learn = Callable[[Batch, State], Any]
"""One eager step: batch and carried state in, a scan (log_likelihood, final) out."""


class GraphedStep:
    """Replays `learn` for batches of one shape."""

    def __init__(self, learn: Learn) -> None:
        self.learn = learn
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0
        self.stream = torch.cuda.Stream()

    def __call__(self, batch: Batch, initial: State) -> Any:
        """As `learn`; or None if this batch cannot be replayed."""
        if not self.fits(batch, initial):
            return None
        if self.graph is None:
            if self.done < WARM_UP:
                self.done += 1
                return self.eagerly(batch, initial)
            self.record(batch, initial)
        self.fill(batch, initial)
        assert self.graph is not None
        self.graph.replay()
        return self.result

    def fits(self, batch: Batch, initial: State) -> bool:
        if batch.lengths is not None:
            return False
        if self.graph is None:
            return initial is not None or not batch.carry
        return batch.tokens.shape == self.batch.tokens.shape

    def eagerly(self, batch: Batch, initial: State) -> Any:
        """Off the main stream, so that nothing it sets up belongs to that stream."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self.learn(batch, initial)
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def record(self, batch: Batch, initial: State) -> None:
        restart = batch.restart
        if initial is not None and restart is None:
            restart = torch.zeros_like(batch.tokens, dtype=torch.bool)
        self.batch = Batch(batch.tokens.clone(), None, None if restart is None else restart.clone(), batch.carry)
        self.initial = _map(torch.clone, initial)
        self.graph = torch.cuda.CUDAGraph()
        # What an earlier run left in a cycle, its graph and all, must not be freed during recording: that spoils it.
        gc.collect()
        with collector_paused(), torch.cuda.graph(self.graph):
            self.result = self.learn(self.batch, self.initial)

    def fill(self, batch: Batch, initial: State) -> None:
        """Put a batch where the graph reads. The first of an epoch carries nothing: it restarts at position 0."""
        self.batch.tokens.copy_(batch.tokens)
        if self.batch.restart is not None:
            if batch.restart is None:
                self.batch.restart.zero_()
            else:
                self.batch.restart.copy_(batch.restart)
            if initial is None:
                self.batch.restart[:, 0] = True
        if initial is not None:
            for mine, given in zip(_tensors(self.initial), _tensors(initial), strict=True):
                mine.copy_(given)


def _map(function: Callable[[Tensor], Tensor], state: State) -> State:
    if isinstance(state, Carry):
        return Carry(*(function(value) for value in state))
    return None if state is None else function(state)


def _tensors(state: State) -> list[Tensor]:
    return list(state) if isinstance(state, Carry) else [] if state is None else [state]
