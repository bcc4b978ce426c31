"""Matrix products of log-probabilities: at the speed of ordinary matrix products, accurate at any scale."""

from functools import cached_property

import torch
from torch import Tensor

from hmmlm.ops.common import NEG_INF
from hmmlm.ops.pieces import at_once, fits
from hmmlm.ops.underflow import exp, flush, least_sum

_WIDE = 4  # columns per row of a wide matrix
_FEW_STATES = 100  # rows up to which a wide matrix is stored as others are
_FEW_ROWS, _MANY_ROWS = 3, 48  # of weights, between which a transposed product with a wide matrix is faster
_CELLS = 2**22  # largest intermediate when sums are recomputed in log space
_DOUBLE_CELLS = 2**26  # largest matrix of which a float64 copy is kept


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the difference of logarithms, −inf where both are −inf."""
    return (numerator - denominator).nan_to_num_(nan=NEG_INF, neginf=NEG_INF)


def _top(log_weights: Tensor) -> Tensor:
    """Return the largest entry of each row [..., 1], finite."""
    return log_weights.amax(-1, keepdim=True).clamp_min(torch.finfo(log_weights.dtype).min)


class LogMatrix:
    """Log-probabilities [n, m] prepared for products log Σ_i exp(w_i + M[i, j]), or several matrices [..., n, m].

    A wide one is stored by columns: on a CPU, products of a few rows with it then take half the time.
    """

    def __init__(self, log_values: Tensor) -> None:
        self.log_values = log_values
        rows, columns = log_values.shape[-2:]
        self._wide = log_values.device.type == "cpu" and rows > _FEW_STATES and columns > _WIDE * rows

    @cached_property
    def peak(self) -> Tensor:
        """The largest entry of each column [m], zero if there is none above −inf; of several matrices [..., 1, m]."""
        peak = self.log_values.amax(-2, keepdim=self.log_values.dim() > 2)
        return torch.where(peak == NEG_INF, 0.0, peak)

    @cached_property
    def scaled(self) -> Tensor:
        """The entries relative to the largest of their column [n, m]."""
        if self._wide:
            return exp(self.log_values.mT.contiguous() - self.peak.unsqueeze(-1)).mT
        return exp(self.log_values - self.peak)

    @property
    def by_columns(self) -> Tensor:
        """`scaled`, transposed [m, n] and contiguous."""
        small = not self.log_values.is_cuda and len(self.log_values) <= _FEW_STATES
        return self._columns if small else self.scaled.t().contiguous()  # which a wide one is already

    @cached_property
    def _columns(self) -> Tensor:
        return self.scaled.t().contiguous()

    @cached_property
    def possible(self) -> Tensor:
        """1 where an entry is above zero, else 0 [n, m]."""
        return (self.log_values > NEG_INF).to(self.log_values.dtype)

    @cached_property
    def probs(self) -> Tensor:
        """The entries themselves [n, m]."""
        return flush(self.log_values.exp())

    @cached_property
    def log_columns(self) -> Tensor:
        """`log_values`, transposed [m, n] and contiguous."""
        return self.log_values.mT.contiguous()

    @cached_property
    def _double(self) -> "LogMatrix":
        return LogMatrix(self.log_values.double())

    def product(self, log_weights: Tensor, normalized: bool = False) -> Tensor:
        """Compute log Σ_i exp(log_weights[..., i] + log_values[i, j]) [..., m] for log_weights [..., n].

        Sums so small that underflow may have changed them are recomputed in log space. `normalized`: every row of
        weights is a distribution (or impossible), so that its largest entry is not small.
        """
        top = None if normalized else _top(log_weights)
        sums = self._sums(log_weights, top)
        return self._logs(sums, log_weights, top)

    def product_by_row(self, log_weights: Tensor, index: tuple[Tensor, ...]) -> Tensor:
        """Compute `product` [b, m] of each row of weights [b, n] with the matrix, of several, that `index` [b] names.

        Rows with sums so small that underflow may have changed them are recomputed in log space.
        """
        top = _top(log_weights)
        sums = torch.bmm(flush((log_weights - top).exp_())[:, None], self.scaled[index])[:, 0]
        result = sums.log().add_(self.peak[index][:, 0]).add_(top)
        if not bool(sums.amin() >= self._least):
            rows = (sums < self._least).any(1).nonzero().squeeze(1)
            exact = log_weights[rows][:, :, None] + self.log_values[tuple(own[rows] for own in index)]
            result[rows] = torch.logsumexp(exact, 1)
        return result

    @property
    def _least(self) -> float:
        return least_sum(self.log_values.shape[-2], self.log_values.dtype)

    def _sums(self, log_weights: Tensor, top: Tensor | None) -> Tensor:
        """Compute Σ_i exp(log_weights[..., i] − top) · scaled[i, j] [..., m]."""
        shifted = log_weights if top is None else log_weights - top
        return self.multiply(flush(shifted.exp())).contiguous()

    def multiply(self, weights: Tensor) -> Tensor:
        """Compute Σ_i weights[..., i] · scaled[i, j] [..., m], stored by rows or by columns."""
        if self._wide and weights.dim() == 2 and _FEW_ROWS < len(weights) <= _MANY_ROWS:
            return (self.scaled.t() @ weights.t()).t()
        return weights @ self.scaled

    def _logs(self, sums: Tensor, log_weights: Tensor, top: Tensor | None) -> Tensor:
        """Return the logarithms [..., m] that belong to `_sums`, recomputed where underflow may have changed a sum."""
        result = sums.log().add_(self.peak if top is None else self.peak + top)
        if sums.numel() and not bool(sums.amin() >= self._least):
            if self.log_values.dim() > 2:
                self._recompute(result, log_weights, sums)
            else:
                m = result.shape[-1]
                self._recompute(result.view(-1, m), log_weights.reshape(-1, len(self.log_values)), sums.view(-1, m))
        return result

    def _recompute(self, result: Tensor, log_weights: Tensor, relative: Tensor) -> None:
        """Replace cells of result [b, m] by sums in log space where underflow may have changed `relative`.

        Cells of probability zero are −inf already. Many cells are recomputed by a product in float64.
        """
        possible = (log_weights > NEG_INF).to(result.dtype) @ self.possible > 0
        *rows, columns = ((relative < self._least) & possible).nonzero(as_tuple=True)
        terms, cells = log_weights.shape[-1], (*rows, columns)
        many = not fits(len(columns) * terms, _CELLS) and fits(self.log_values.numel(), _DOUBLE_CELLS)
        if many and result.dtype == torch.float32:
            result[cells] = self._double.product(log_weights.double())[cells].to(result)
            return
        by_column = self.log_values.mT
        for piece in torch.arange(len(columns), device=columns.device).split(at_once(terms, _CELLS)):
            own, column = tuple(index[piece] for index in rows), columns[piece]
            result[(*own, column)] = torch.logsumexp(log_weights[own] + by_column[(*own[:-1], column)], 1)
