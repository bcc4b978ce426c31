"""The steps of a recursion through a batch: products with its transition, or with the tiles that the batch needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hmmlm.numerics.semirings import LOG, PROBABILITY, Semiring
from hmmlm.numerics.support import BlockSupport, Support, some_rows
from hmmlm.ops.pieces import at_once, fits
from hmmlm.ops.underflow import exp
from hmmlm.scan.lattice import Lattice, Packed, SortedBatch, Stack, Supports, condition
from hmmlm.transitions import Transition
from hmmlm.transitions.tiled import TiledTransition

_CELLS = 2**22  # of tiles of the transition whose counts are computed together
_TILE_CELLS = 2**26  # of the tiles of a batch: 256 MB in float32


class Steps:
    """Steps of values of a semiring between the supports of neighbouring positions."""

    def __init__(self, ring: Semiring, transition: Transition) -> None:
        self.ring, self.transition = ring, transition

    def forward(self, t: int, x: Tensor, source: Support, target: Support) -> Tensor:
        """Compute Σ_i x_i A[i, j] [n, K'] from position t − 1 to t."""
        return self.transition.forward_step(self.ring, x, source, target)

    def backward(self, t: int, y: Tensor, source: Support, target: Support) -> Tensor:
        """Compute Σ_j A[i, j] y_j [n, K] from position t to t − 1."""
        return self.transition.backward_step(self.ring, y, source, target)

    def gradient(self, pairs: list[tuple[Stack, Stack]], weights: Tensor) -> dict[str, Tensor]:
        """Compute the derivatives of Σ weights_n x_n A y_n by the tensors of the transition.

        Args:
            pairs: x at position t − 1 and y at position t, of which row n of the batch [B] has weights_n.
        """
        totals = {name: torch.zeros_like(value) for name, value in self.transition.parameters().items()}
        for (row, _, x, source), (_, _, y, target) in pairs:
            apart = self.ring is LOG or source is not None or target is not None
            size = at_once(x.shape[1] * y.shape[1], _CELLS) if apart else len(x)
            for piece in torch.arange(len(x), device=x.device).split(size):
                own, other, weight = some_rows(source, piece), some_rows(target, piece), weights[row[piece]]
                found = self.transition.gradient(self.ring, x[piece], y[piece], weight, own, other)
                for name, value in found.items():
                    totals[name] += value
        return totals


class TileSteps(Steps):
    """Steps in probabilities between single blocks: tiles are computed for all steps at once, equal ones once."""

    transition: TiledTransition

    def __init__(self, transition: TiledTransition, pairs: Tensor, index: Sequence[Tensor], width: int) -> None:
        """Prepare the tiles of pairs [P], source · M + target; `index` [n] are those of the rows of each step."""
        super().__init__(PROBABILITY, transition)
        blocks = transition.num_states // width
        self.sources, self.targets, self.index = pairs // blocks, pairs % blocks, index
        self.tiles = exp(transition.make_tiles(self.sources, self.targets, width))  # [P, k, k]

    def forward(self, t: int, x: Tensor, source: Support, target: Support) -> Tensor:
        return self._multiply(t, x, lambda rows, tiles: torch.bmm(rows[:, None], tiles)[:, 0])

    def backward(self, t: int, y: Tensor, source: Support, target: Support) -> Tensor:
        return self._multiply(t, y, lambda rows, tiles: torch.bmm(tiles, rows[:, :, None])[..., 0], transposed=True)

    def _multiply(
        self, t: int, values: Tensor, multiply: Callable[[Tensor, Tensor], Tensor], transposed: bool = False
    ) -> Tensor:
        """Multiply values [n, k] by the tiles of step t."""
        index, tiles = self.index[t - 1], self.tiles
        if len(tiles) == 1 or len(index) == 1:  # one tile for all rows
            tile = tiles[0 if len(tiles) == 1 else int(index)]
            return values @ (tile.t() if transposed else tile)
        size = at_once(tiles[0].numel(), _TILE_CELLS)
        pairs = zip(values.split(size), index.split(size), strict=True)
        return torch.cat([multiply(rows, tiles.index_select(0, own)) for rows, own in pairs])

    def gradient(self, pairs: list[tuple[Stack, Stack]], weights: Tensor) -> dict[str, Tensor]:
        if not pairs:
            return super().gradient(pairs, weights)
        (((row, _, x, _), (_, _, y, _)),) = pairs
        y = y * weights[row, None]
        counts, index = torch.zeros_like(self.tiles), torch.cat(list(self.index))
        if 4 * len(counts) <= len(index):
            order, sizes = index.argsort(stable=True), index.bincount(minlength=len(counts)).tolist()
            for total, rows in zip(counts, order.split(sizes), strict=True):
                torch.mm(x[rows].t(), y[rows], out=total)
        else:
            size = at_once(counts[0].numel(), _CELLS)
            for left, right, own in zip(x.split(size), y.split(size), index.split(size), strict=True):
                counts.index_add_(0, own, left[:, :, None] * right[:, None])
        return self.transition.tile_gradient(self.sources, self.targets, counts.mul_(self.tiles))


def add_step(steps: Steps, lattice: Lattice, first: Tensor, normalize: bool = True) -> Tensor:
    """Add the next step to a lattice; return the predictions p(z_t | past) [n, K].

    Args:
        first: [n, K] p(z_1) over the support, which the first step uses.
        normalize: whether the values are divided by their sum; otherwise the scale of the step is log 1.
    """
    t = len(lattice.filtered)
    scores, predicted = lattice.scores[t], first
    rows = scores.shape[0]
    if t:
        source = some_rows(lattice.supports[t - 1], slice(rows))
        predicted = steps.forward(t, lattice.filtered[t - 1][:rows], source, lattice.supports[t])
    if normalize:
        filtered, scale = condition(steps.ring, predicted, scores)
    else:
        filtered, scale = steps.ring.times(predicted, scores), scores.new_zeros(rows)
    lattice.filtered.extend([filtered])
    lattice.scales.extend([scale])
    return predicted


def pass_back(
    steps: Steps,
    lattice: Lattice,
    last: Tensor,
    arrive: Callable[[int, Tensor], Tensor],
    limit: Callable[[Tensor], Tensor],
) -> tuple[Packed, Packed]:
    """Return messages m_t = p(x_t+1.. | z_t) / p(x_t+1.. | x_1..t) [n, K] and weights m_t p(x_t | z_t) / p(x_t | past).

    Args:
        last: [B] the message where a sequence ends.
        arrive: called with t and the messages that arrive from step t + 1; returns those that are used.
        limit: called with weights; returns those that are used.
    """
    messages, weights, shares = list[Tensor](), list[Tensor](), lattice.scores.map(steps.ring.divide, lattice.scales)
    for t in reversed(range(len(lattice.filtered))):
        share = shares[t]
        message = last[: len(share), None].expand_as(share)
        if weights:
            rows = len(weights[-1])
            source, target = some_rows(lattice.supports[t], slice(rows)), lattice.supports[t + 1]
            arrived = arrive(t, steps.backward(t + 1, weights[-1], source, target))
            message = arrived if rows == len(message) else torch.cat([arrived, message[rows:]])
        messages.append(message)
        weights.append(limit(steps.ring.times(share, message)))
    return Packed(lattice.batch, messages[::-1]), Packed(lattice.batch, weights[::-1])


def between(transition: Transition, batch: SortedBatch, supports: Supports) -> Steps:
    """Return the steps in probabilities of a batch; in tiles where these serve."""
    own, later = supports.blocks, batch.active[1:]
    if own is None or not later or not isinstance(transition, TiledTransition):
        return Steps(PROBABILITY, transition)
    return steps_of(transition, own.rows(batch.before), own.rows(slice(batch.active[0], None)), later)


def steps_of(transition: TiledTransition, source: BlockSupport, target: BlockSupport, sizes: Sequence[int]) -> Steps:
    """Return the steps in probabilities from blocks [n] to others, of steps of `sizes` one after the other."""
    width = source.width
    distinct, index = (source.blocks * (transition.num_states // width) + target.blocks).unique(return_inverse=True)
    if not fits(len(distinct) * width**2, _TILE_CELLS):
        return Steps(PROBABILITY, transition)
    return TileSteps(transition, distinct, index.split(list(sizes)), width)
