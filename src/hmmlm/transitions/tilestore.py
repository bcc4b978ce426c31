"""Tiles of a factored transition matrix that are computed once and kept, for queries on a CPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.ops.underflow import flush, least_sum


class TileStore:
    """Products with tiles of log A between pairs of blocks.

    Frequent pairs occur early in a text, so the first tiles are kept until there is no room for more.
    """

    def __init__(self, make: Callable[[int, int], Tensor], blocks: int, room: int) -> None:
        """Create a store.

        Args:
            make: returns log A [k, k] from one block to another.
            room: number of tiles to keep.
        """
        self._make, self._blocks, self._room = make, blocks, room
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def product(self, log_probs: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        """Compute log Σ_i p_i A[i, j] [n, k] for log_probs [n, k], from source blocks to target blocks [n].

        Rows with the same pair of blocks share a product of probabilities. Where underflow may have changed a sum, the
        rows of the pair are computed again by `LogMatrix.product`.
        """
        pair, order = (sources * self._blocks + targets).sort(stable=True)
        pairs, counts = pair.unique_consecutive(return_counts=True)
        ends = counts.cumsum(0).tolist()
        groups = list(zip(pairs.tolist(), [0, *ends], ends, strict=False))
        values = log_probs.index_select(0, order)
        top = values.amax(1, keepdim=True).clamp_min(torch.finfo(values.dtype).min)
        weights = flush((values - top).exp_())
        sums, peaks = torch.empty_like(values), torch.empty_like(values)
        for key, first, end in groups:
            peaks[first:end], scaled = self.tile(key)
            torch.mm(weights[first:end], scaled, out=sums[first:end])
        result = sums.log().add_(peaks).add_(top)
        suspect = sums.amin(1) < least_sum(values.shape[1], values.dtype)
        if bool(suspect.any()):
            for key, first, end in groups:
                if bool(suspect[first:end].any()):
                    exact = LogMatrix(self._make(*divmod(key, self._blocks)))
                    result[first:end] = exact.product(values[first:end])
        return torch.empty_like(result).index_copy_(0, order, result)

    def tile(self, key: int) -> tuple[Tensor, Tensor]:
        """Return the largest entries of the columns of log A [k], and exp(log A) [k, k] relative to them.

        `key` is source · M + target.
        """
        tile = self._kept.get(key)
        if tile is None:
            matrix = LogMatrix(self._make(*divmod(key, self._blocks)))
            tile = matrix.peak, matrix.scaled
            if len(self._kept) < self._room:
                self._kept[key] = tile
        return tile
