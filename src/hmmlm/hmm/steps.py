"""The steps of a recursion through a batch: products with its transition, or with the tiles that the batch needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hmmlm.hmm.lattice import Lattice, Observed, Step, condition, stack_together
from hmmlm.numerics.semirings import LOG, PROBABILITY, Semiring
from hmmlm.numerics.support import BlockSupport, Support, first_rows, some_rows
from hmmlm.ops.underflow import exp
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

    def gradient(self, before: list[Step], after: list[Step], weights: Tensor) -> dict[str, Tensor]:
        """Compute the derivatives of Σ weights_n x_n A y_n by the tensors of the transition.

        Args:
            before: x at position t − 1, in the order of `after`.
            after: y at position t, of which row n of the batch [B] has weights_n.
        """
        totals = {name: torch.zeros_like(value) for name, value in self.transition.parameters().items()}
        for (row, _, x, source), (_, _, y, target) in zip(*stack_together(before, after), strict=True):
            apart = self.ring is LOG or source is not None or target is not None
            size = max(1, _CELLS // (x.shape[1] * y.shape[1])) if apart else len(x)
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
        size = max(1, _TILE_CELLS // tiles[0].numel())
        pairs = zip(values.split(size), index.split(size), strict=True)
        return torch.cat([multiply(rows, tiles.index_select(0, own)) for rows, own in pairs])

    def gradient(self, before: list[Step], after: list[Step], weights: Tensor) -> dict[str, Tensor]:
        if not after:
            return super().gradient(before, after, weights)
        x = torch.cat([values for _, _, values, _ in before])
        y = torch.cat([values * weights[: len(values), None] for _, _, values, _ in after])
        counts, index = torch.zeros_like(self.tiles), torch.cat(list(self.index))
        if 4 * len(counts) <= len(index):
            order, sizes = index.argsort(stable=True), index.bincount(minlength=len(counts)).tolist()
            for total, rows in zip(counts, order.split(sizes), strict=True):
                torch.mm(x[rows].t(), y[rows], out=total)
        else:
            size = max(1, _CELLS // counts[0].numel())
            for left, right, own in zip(x.split(size), y.split(size), index.split(size), strict=True):
                counts.index_add_(0, own, left[:, :, None] * right[:, None])
        return self.transition.tile_gradient(self.sources, self.targets, counts.mul_(self.tiles))


def add_step(steps: Steps, lattice: Lattice, observed: Observed, first: Tensor, normalize: bool = True) -> Tensor:
    """Add a step with the support of a token and its scores [n, K], as values of a semiring, to a lattice.

    Return the predictions p(z_t | past) [n, K].

    Args:
        first: [n, K] p(z_1) over the support, which the first step uses.
        normalize: whether the values are divided by their sum; otherwise the scale of the step is log 1.
    """
    support, scores = observed
    predicted, rows, t = first, len(scores), len(lattice.supports)
    if t:
        source = first_rows(lattice.supports[-1], rows)
        predicted = steps.forward(t, lattice.filtered[-1][:rows], source, support)
    if normalize:
        filtered, scale = condition(steps.ring, predicted, scores)
    else:
        filtered, scale = steps.ring.times(predicted, scores), scores.new_zeros(rows)
    lattice.supports.append(support)
    lattice.scores.append(scores)
    lattice.filtered.append(filtered)
    lattice.scales.append(scale)
    return predicted


def between(ring: Semiring, transition: Transition, supports: Sequence[Support]) -> Steps:
    """Return the steps between neighbouring supports, whose rows become fewer; in tiles where these serve."""
    blocks = [each.blocks for each in supports if isinstance(each, BlockSupport) and not each.wide]
    if ring is not PROBABILITY or not isinstance(transition, TiledTransition) or not 1 < len(blocks) == len(supports):
        return Steps(ring, transition)
    pairs = [(source[: len(target)], target) for source, target in pairwise(blocks)]
    return steps_of(transition, pairs, supports[0].width)  # type: ignore[union-attr]


def steps_of(transition: TiledTransition, pairs: Sequence[tuple[Tensor, Tensor]], width: int) -> Steps:
    """Return the steps in probabilities between pairs of blocks [n] for each step."""
    blocks = transition.num_states // width
    numbers = torch.cat([source * blocks + target for source, target in pairs])
    distinct, index = numbers.unique(return_inverse=True)
    if len(distinct) * width**2 > _TILE_CELLS:
        return Steps(PROBABILITY, transition)
    return TileSteps(transition, distinct, index.split([len(source) for source, _ in pairs]), width)
