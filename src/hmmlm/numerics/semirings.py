"""The semirings in which the recursions of an HMM run.

The forward recursion is the filter in log space, the scaled filter in probabilities, Viterbi's algorithm in max-plus,
and reachability in Booleans: only sums and products differ.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.ops.common import NEG_INF, finite, logsumexp
from hmmlm.ops.pieces import MOST, at_once
from hmmlm.ops.underflow import flush


class Semiring(ABC):
    """Sums and products of values [n, K] that stand for probabilities."""

    zero: float

    @abstractmethod
    def from_log(self, log_probs: Tensor) -> Tensor:
        """Return the values of log-probabilities."""

    @abstractmethod
    def times(self, a: Tensor, b: Tensor) -> Tensor: ...

    @abstractmethod
    def total(self, values: Tensor) -> Tensor:
        """Return the sum of each row [n]."""

    @abstractmethod
    def divide(self, values: Tensor, totals: Tensor) -> Tensor:
        """Divide rows [n, K] by totals [n]; a row of total zero is zero."""

    @abstractmethod
    def product(self, values: Tensor, matrix: LogMatrix, normalized: bool = False) -> Tensor:
        """Multiply values [..., n] by one matrix [n, m], or values [g, b, n] by one of [g, n, m] each.

        Args:
            normalized: every row of values is a distribution, or zero.
        """

    @abstractmethod
    def reduce(self, values: Tensor, log_tiles: Tensor) -> Tensor:
        """Multiply values [b, K] by matrices of log-probabilities, one [K, K'] or one for each row [b, K, K']."""


class _Logarithms(Semiring):
    """Values are log-probabilities."""

    zero = NEG_INF

    def from_log(self, log_probs: Tensor) -> Tensor:
        return log_probs

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def divide(self, values: Tensor, totals: Tensor) -> Tensor:
        return values - finite(totals)[:, None]


class _Log(_Logarithms):
    """Sums are exact at any scale."""

    def total(self, values: Tensor) -> Tensor:
        return logsumexp(values, 1)

    def product(self, values: Tensor, matrix: LogMatrix, normalized: bool = False) -> Tensor:
        if _differentiable(values, matrix.log_values):
            return logsumexp(values[..., None] + matrix.log_values.unsqueeze(-3), -2)
        return matrix.product(values, normalized)

    def reduce(self, values: Tensor, log_tiles: Tensor) -> Tensor:
        if log_tiles.dim() == 2 and not _differentiable(values, log_tiles):
            return LogMatrix(log_tiles).product(values)
        return logsumexp(values[:, :, None] + log_tiles, 1)


class _MaxPlus(_Logarithms):
    """The sum is the maximum: values are those of best paths."""

    def total(self, values: Tensor) -> Tensor:
        return values.amax(1)

    def product(self, values: Tensor, matrix: LogMatrix, normalized: bool = False) -> Tensor:
        if matrix.log_values.dim() == 2:
            return best_origins(values, matrix.log_columns)
        size = at_once(matrix.log_values.numel())
        pieces = [(part[..., None] + matrix.log_values.unsqueeze(-3)).amax(-2) for part in values.split(size, -2)]
        return torch.cat(pieces, -2)

    def reduce(self, values: Tensor, log_tiles: Tensor) -> Tensor:
        return torch.cat([(piece[:, :, None] + tile).amax(1) for piece, tile in row_pieces(values, log_tiles)])


class _Probability(Semiring):
    """Values below FLOOR are zero."""

    zero = 0.0

    def from_log(self, log_probs: Tensor) -> Tensor:
        return flush(log_probs.exp())

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def total(self, values: Tensor) -> Tensor:
        return values.sum(1)

    def divide(self, values: Tensor, totals: Tensor) -> Tensor:
        return flush(values / totals.clamp_min(torch.finfo(values.dtype).tiny)[:, None])

    def product(self, values: Tensor, matrix: LogMatrix, normalized: bool = False) -> Tensor:
        return values @ self._matrix(matrix)

    def reduce(self, values: Tensor, log_tiles: Tensor) -> Tensor:
        tiles = self.from_log(log_tiles)
        return values @ tiles if tiles.dim() == 2 else torch.bmm(values[:, None], tiles)[:, 0]

    def _matrix(self, matrix: LogMatrix) -> Tensor:
        return matrix.probs


class _Boolean(_Probability):
    """1 for what is possible and 0 for what is not, at any scale."""

    def from_log(self, log_probs: Tensor) -> Tensor:
        return (log_probs > NEG_INF).to(log_probs.dtype)

    def total(self, values: Tensor) -> Tensor:
        return values.amax(1)

    def divide(self, values: Tensor, totals: Tensor) -> Tensor:
        return values

    def product(self, values: Tensor, matrix: LogMatrix, normalized: bool = False) -> Tensor:
        return (super().product(values, matrix) > 0).to(values.dtype)

    def reduce(self, values: Tensor, log_tiles: Tensor) -> Tensor:
        return (super().reduce(values, log_tiles) > 0).to(values.dtype)

    def _matrix(self, matrix: LogMatrix) -> Tensor:
        return matrix.possible


LOG, MAX_PLUS, PROBABILITY, BOOLEAN = _Log(), _MaxPlus(), _Probability(), _Boolean()


def _differentiable(*values: Tensor) -> bool:
    return torch.is_grad_enabled() and any(value.requires_grad for value in values)


def row_pieces(values: Tensor, tiles: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pieces of values [b, K] with their tiles: of one tile for all rows, pieces of bounded sums [·, K, K']."""
    if tiles.dim() == 3:
        yield values, tiles
    else:
        for piece in values.split(at_once(tiles.numel())):
            yield piece, tiles


def best_origins(log_probs: Tensor, into: Tensor) -> Tensor:
    """Compute max_i log p_i + log A[i, j] [n, m] for log_probs [n, K] and into [m, K], the transposed log A.

    Sums are taken in pieces that stay in the CPU's cache.
    """
    (batch, states), targets = log_probs.shape, into.shape[0]
    cells = at_once(1, MOST if log_probs.is_cuda else 2**17)
    if batch * states * targets <= cells:
        return (log_probs[:, None, :] + into).amax(2)
    columns = max(1, min(targets, cells // states))
    rows = max(1, cells // (states * columns))
    out, buffer = log_probs.new_empty(batch, targets), log_probs.new_empty(rows, columns, states)
    for j in range(0, targets, columns):
        piece = into[j : j + columns]
        for b in range(0, batch, rows):
            sums = buffer[: min(rows, batch - b), : piece.shape[0]]
            torch.add(log_probs[b : b + rows, None, :], piece, out=sums)
            torch.amax(sums, 2, out=out[b : b + rows, j : j + columns])
    return out
