"""Matrix products of log-probabilities: at the speed of ordinary matrix products, accurate at any scale."""

import torch
from torch import Tensor

from hmmlm.ops.common import FLOOR, NEG_INF, exp

_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}  # relative mass that a sum may lose to underflow
_CELLS = 2**22  # largest intermediate when sums are recomputed in log space


def least_sum(n: int, dtype: torch.dtype) -> float:
    """Return the least sum of n products of scaled values that underflow cannot have changed beyond the tolerance."""
    return FLOOR[dtype] * n / _TOLERANCE[dtype]


class LogMatrix:
    """A matrix of log-probabilities [n, m], prepared for products log Σ_i exp(w_i + M[i, j])."""

    def __init__(self, log_values: Tensor) -> None:
        peak = log_values.amax(0)
        self.log_values = log_values
        self.peak = torch.where(peak == NEG_INF, 0.0, peak)  # [m]
        self.scaled = exp(log_values - self.peak)  # entries of at most 1

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
        relative = torch.nn.functional.threshold(shifted.exp(), FLOOR[dtype], 0.0) @ self.scaled
        result = relative.log().add_(offset)
        least = least_sum(n, dtype)
        if not bool(relative.amin() >= least):
            rows = (result.view(-1, result.shape[-1]), log_weights.reshape(-1, n), relative.view(-1, result.shape[-1]))
            self._recompute(*rows, least)
        return result

    def _recompute(self, result: Tensor, log_weights: Tensor, relative: Tensor, least: float) -> None:
        """Replace cells of result [b, m] by sums in log space where `relative` is below `least`.

        Cells of probability zero are −inf already.
        """
        faint = relative < least
        rows = faint.any(1).nonzero().squeeze(1)
        possible = (log_weights[rows] > NEG_INF).to(result.dtype) @ (self.log_values > NEG_INF).to(result.dtype) > 0
        cells, columns = (faint[rows] & possible).nonzero(as_tuple=True)
        for piece in torch.arange(len(columns), device=columns.device).split(max(1, _CELLS // len(self.log_values))):
            row, column = rows[cells[piece]], columns[piece]
            result[row, column] = torch.logsumexp(log_weights[row] + self.log_values.t()[column], 1)
