"""The interface of transitions, A[i, j] = p(z_t = j | z_t−1 = i), and what follows for every kind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from hmmlm.numerics.semirings import LOG, Semiring
from hmmlm.numerics.support import BlockSupport, Support
from hmmlm.numerics.tables import Tables
from hmmlm.ops.common import NEG_INF
from hmmlm.ops.pieces import at_once
from hmmlm.transitions.tiles import contract, entropy_of_sources


class Transition(Tables):
    """A transition between Z states.

    A step takes values of a semiring [n, K] over the states of a support (None: all) to those of another. A kind
    implements entries of log A; a structured one overrides the steps, so that A is never stored.
    """

    role = "transition"

    @abstractmethod
    def log_entries(self, i: Tensor, j: Tensor) -> Tensor:
        """Return `log A[i, j]` for states that broadcast, differentiable."""

    def forward_step(self, ring: Semiring, x: Tensor, source: Support = None, target: Support = None) -> Tensor:
        """Compute Σ_i x_i A[i, j] [n, K'] for x [n, K]; in log space, rows of x are distributions or impossible."""
        return contract(self, ring.reduce, x, source, target, forward=True, zero=ring.zero)

    def backward_step(self, ring: Semiring, y: Tensor, source: Support = None, target: Support = None) -> Tensor:
        """Compute Σ_j A[i, j] y_j [n, K] for y [n, K']."""
        return contract(self, ring.reduce, y, target, source, forward=False, zero=ring.zero)

    # --- derived ---

    def log_block(self, rows: slice, columns: slice) -> Tensor:
        """Return log A[rows, columns], differentiable."""
        every = torch.arange(self.num_states, device=self.device)
        return self.log_entries(every[rows, None], every[columns])

    def dense(self) -> Tensor:
        """Return log A [Z, Z]."""
        return self.log_block(slice(None), slice(None))

    def tiles(self, sources: Tensor, targets: Tensor, width: int) -> Tensor:
        """Return log A [n, k, k] between pairs of blocks [n] of `width` = k states."""
        inner = torch.arange(width, device=sources.device)
        rows, columns = sources[:, None] * width + inner, targets[:, None] * width + inner
        return self.log_entries(rows[:, :, None], columns[:, None, :])

    def pieces(self, inner: slice, outer: slice, forward: bool = True) -> Iterator[Tensor]:
        """Yield log A from all of `inner` into pieces of `outer`; transposed unless `forward`."""
        size = at_once(inner.stop - inner.start)
        for first in range(outer.start, outer.stop, size):
            part = slice(first, min(first + size, outer.stop))
            yield self.log_block(inner, part) if forward else self.log_block(part, inner).t()

    def reduce_row(self, values: Tensor, inner: slice, outer: slice, forward: bool) -> Tensor | None:
        """Multiply one row of log-probabilities [1, K] without a piece of A; None if that is not faster."""
        return None

    def log_rows(self, states: Tensor) -> Tensor:
        """Return `log A[i, :]` [n, Z] from states i [n]."""
        return self.log_entries(states[:, None], torch.arange(self.num_states, device=states.device))

    def log_columns(self, states: Tensor, source: Support = None) -> Tensor:
        """Return `log A[i, j]` [..., n, K] from the states i of a source support into states j [..., n]."""
        if source is None:
            return self._into(states)
        assert isinstance(source, BlockSupport)
        if not source.wide:
            return self._into_block(states, source.blocks, source.width)
        outside = source.outside(self.num_states // source.width).repeat_interleave(source.width, 1)
        return self._into(states).masked_fill(outside, NEG_INF)

    def _into(self, states: Tensor) -> Tensor:
        """Return `log A[:, j]` [..., n, Z] into states j [..., n]."""
        return self.log_entries(torch.arange(self.num_states, device=states.device), states[..., None])

    def _into_block(self, states: Tensor, blocks: Tensor, width: int) -> Tensor:
        """Return `log A[i, j]` [..., n, k] from the states of a block for each [n] into states j [..., n]."""
        rows = blocks[:, None] * width + torch.arange(width, device=states.device)
        return self.log_entries(rows, states[..., None])

    def origin_entropy(self, log_probs: Tensor, source: Support = None, target: Support = None) -> Tensor:
        """Compute the entropy of p(i | j) ∝ p_i A[i, j] for each target j [n, K'], given log_probs [n, K]."""
        return contract(self, entropy_of_sources, log_probs, source, target, forward=True).clamp_min(0)

    def gradient(
        self, ring: Semiring, x: Tensor, y: Tensor, weights: Tensor, source: Support = None, target: Support = None
    ) -> dict[str, Tensor]:
        """Compute the derivatives of Σ_n weights_n x_n A y_n by the tensors: expected counts of log-probabilities.

        Args:
            x: [n, K] values of a semiring.
            y: [n, K'] likewise.
            weights: [n]
        """
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in self.parameters().items()}
            moved = ring.times(self.replace(leaves).forward_step(ring, x, source, target), y)
            total = ((moved.exp() if ring is LOG else moved) * weights[:, None]).sum()
            found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, found, strict=True))
