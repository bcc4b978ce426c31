"""Matrix products of log-probabilities: at the speed of ordinary matrix products, accurate at any scale."""

from functools import cached_property

import torch
from torch import Tensor

from hmmlm.ops.common import FLOOR, NEG_INF, exp

_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}  # relative mass that a sum may lose to underflow
_WIDE, _FEW_ROWS = 4, 3  # columns per row of a wide matrix; rows for which a product with its columns is slower
_CELLS = 2**22  # largest intermediate when sums are recomputed in log space
_DOUBLE_CELLS = 2**26  # largest matrix of which a float64 copy is kept


def least_sum(n: int, dtype: torch.dtype) -> float:
    """Return the least sum of n products of scaled values that underflow cannot have changed beyond the tolerance."""
    return FLOOR[dtype] * n / _TOLERANCE[dtype]


class LogMatrix:
    """A matrix of log-probabilities [n, m], prepared for products log Σ_i exp(w_i + M[i, j]).

    A wide one is stored by columns: on a CPU, products of a few rows with it then take half the time.
    """

    def __init__(self, log_values: Tensor) -> None:
        peak = log_values.amax(0)
        self.log_values = log_values
        self.peak = torch.where(peak == NEG_INF, 0.0, peak)  # [m]
        self._wide = not log_values.is_cuda and log_values.shape[1] > _WIDE * len(log_values)
        # Entries of at most 1.
        self.scaled = (
            exp(log_values.t().contiguous() - self.peak[:, None]).t() if self._wide else exp(log_values - self.peak)
        )

    @cached_property
    def _possible(self) -> Tensor:
        return (self.log_values > NEG_INF).to(self.log_values.dtype)

    @cached_property
    def _double(self) -> "LogMatrix":
        return LogMatrix(self.log_values.double())

    def product(self, log_weights: Tensor, normalized: bool = False) -> Tensor:
        """Compute log Σ_i exp(log_weights[..., i] + log_values[i, j]) [..., m] for log_weights [..., n].

        Sums so small that underflow may have changed them are recomputed in log space. `normalized`: every row of
        weights is a distribution (or impossible), so that its largest entry is not small.
        """
        n, dtype = len(self.log_values), self.log_values.dtype
        offset = self.peak
        shifted = log_weights
        if not normalized:
            top = log_weights.amax(-1, keepdim=True).clamp_min(torch.finfo(dtype).min)
            shifted, offset = log_weights - top, self.peak + top
        # Denormal numbers would slow the product down.
        weights = torch.nn.functional.threshold(shifted.exp(), FLOOR[dtype], 0.0)
        if self._wide and weights.dim() == 2 and len(weights) > _FEW_ROWS:
            relative = (self.scaled.t() @ weights.t()).t().contiguous()
        else:
            relative = weights @ self.scaled
        result = relative.log().add_(offset)
        least = least_sum(n, dtype)
        if not bool(relative.amin() >= least):
            rows = (result.view(-1, result.shape[-1]), log_weights.reshape(-1, n), relative.view(-1, result.shape[-1]))
            self._recompute(*rows, least)
        return result

    def _recompute(self, result: Tensor, log_weights: Tensor, relative: Tensor, least: float) -> None:
        """Replace cells of result [b, m] by sums in log space where `relative` is below `least`.

        Cells of probability zero are −inf already. Many cells are recomputed by a product in float64.
        """
        faint = relative < least
        rows = faint.any(1).nonzero().squeeze(1)
        possible = (log_weights[rows] > NEG_INF).to(result.dtype) @ self._possible > 0
        cells, columns = (faint[rows] & possible).nonzero(as_tuple=True)
        many = len(columns) * len(self.log_values) > _CELLS and self.log_values.numel() <= _DOUBLE_CELLS
        if many and result.dtype == torch.float32:
            result[rows[cells], columns] = self._double.product(log_weights[rows].double())[cells, columns].to(result)
            return
        for piece in torch.arange(len(columns), device=columns.device).split(max(1, _CELLS // len(self.log_values))):
            row, column = rows[cells[piece]], columns[piece]
            result[row, column] = torch.logsumexp(log_weights[row] + self.log_values.t()[column], 1)


class LogTiles:
    """Matrices of log-probabilities [..., n, m], prepared for products of rows with one of them each."""

    def __init__(self, log_values: Tensor) -> None:
        peak = log_values.amax(-2)
        self.log_values = log_values
        self.peak = torch.where(peak == NEG_INF, 0.0, peak)  # [..., m]
        self.scaled = exp(log_values - self.peak[..., None, :])  # entries of at most 1

    def product(self, log_weights: Tensor, tiles: tuple[Tensor, ...]) -> Tensor:
        """Compute log Σ_i exp(log_weights[b, i] + log_values[tiles[b], i, j]) [b, m] for log_weights [b, n].

        Rows with sums so small that underflow may have changed them are recomputed in log space.
        """
        dtype = log_weights.dtype
        top = log_weights.amax(1, keepdim=True).clamp_min(torch.finfo(dtype).min)
        # Denormal numbers would slow the product down.
        weights = torch.nn.functional.threshold((log_weights - top).exp_(), FLOOR[dtype], 0.0)
        relative = torch.bmm(weights[:, None], self.scaled[tiles])[:, 0]
        result = relative.log().add_(self.peak[tiles]).add_(top)
        least = least_sum(log_weights.shape[1], dtype)
        if not bool(relative.amin() >= least):
            rows = (relative < least).any(1).nonzero().squeeze(1)
            exact = log_weights[rows][:, :, None] + self.log_values[tuple(index[rows] for index in tiles)]
            result[rows] = torch.logsumexp(exact, 1)
        return result
