"""The emission matrix prepared for products and for sums over groups of words.

Words that never occurred in training have the same column: p(word | z) is what smoothing gave to all of them. Such
columns are stored once. Of a model distilled from a language model, three quarters of the vocabulary may be of this
kind, and a product with a few rows takes the time of reading the matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.ops.common import NEG_INF
from hmmlm.ops.pieces import at_once
from hmmlm.ops.underflow import least_sum

_PROBES = 8  # rows by which columns are compared first
_BAG = 64  # values that are added in the model's precision; their sums are added in float64
_LARGE_GROUP = 64  # rows that are summed on their own


class EmissionMatrix:
    """log p(word | z) [Z, V] with equal columns stored once."""

    def __init__(self, log_emission: Tensor) -> None:
        self._log_emission = log_emission
        found = equal_columns(log_emission)
        self.column_of = None if found is None else found[1]  # [V] of each word, if not its own
        self.matrix = LogMatrix(log_emission if found is None else log_emission.index_select(1, found[0]))  # [Z, U]

    def product(self, log_states: Tensor) -> Tensor:
        """Compute log Σ_z p(z) p(word | z) [..., V] for log_states [..., Z]."""
        product = self.matrix.product(log_states)
        return product if self.column_of is None else product.index_select(-1, self.column_of)

    def group_sums(self, group_of_word: Tensor, groups: int) -> Tensor:
        """Compute log p(a word of the group | z) [groups, Z] for a partition of the vocabulary, group_of_word [V]."""
        matrix, columns = self.matrix, len(self.matrix.peak)
        column_of = torch.arange(columns, device=group_of_word.device) if self.column_of is None else self.column_of
        pairs, counts = (group_of_word * columns + column_of).unique(return_counts=True)  # sorted by group
        group, column = pairs // columns, pairs % columns
        sizes = group.bincount(minlength=groups)
        place = torch.arange(len(group), device=group.device) - (sizes.cumsum(0) - sizes)[group]
        bags = (place % _BAG == 0).nonzero()[:, 0]
        sums = torch.nn.functional.embedding_bag(
            column,
            matrix.by_columns,
            bags,
            mode="sum",
            per_sample_weights=counts * matrix.peak[column].exp(),
        )
        total = torch.zeros(groups, sums.shape[1], dtype=torch.float64, device=sums.device)
        total.index_add_(0, group[bags], sums.double())
        result = total.log().to(sums)
        least = least_sum(1, sums.dtype) * group_of_word.bincount(minlength=groups)
        suspect = (total.amin(1) < least).nonzero()[:, 0]
        if len(suspect):  # some sums may have underflowed: in log space
            words = torch.isin(group_of_word, suspect).nonzero()[:, 0]
            number = torch.searchsorted(suspect, group_of_word[words])
            pieces = self._log_emission.split(at_once(len(words)))
            sums_of = [log_group_sums(piece.index_select(1, words).t(), number, len(suspect)) for piece in pieces]
            result[suspect] = torch.cat(sums_of, 1)
        return result


def equal_columns(values: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the places [U] of distinct columns of values [n, m], and the number of each column's [m] among them.

    None if columns are equal so rarely that storing them once would not pay.
    """
    probes = torch.cat([values[:: max(1, len(values) // _PROBES)], values.amax(0, keepdim=True)])
    distinct, which = probes.unique(dim=1, return_inverse=True)
    if 2 * distinct.shape[1] > values.shape[1]:
        return None
    places = torch.arange(len(which), device=which.device)
    first = places.new_full((distinct.shape[1],), len(which)).scatter_reduce(0, which, places, "amin")
    of_column = first[which]
    if not all(torch.equal(row.index_select(-1, of_column), row) for row in values.split(64)):
        return None
    return first, which


def log_group_sums(log_values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Compute log Σ over the rows of each group [groups, n] for log_values [V, n] and group [V].

    The sum is in float64: thousands of rare words are lost when they are added to a sum of frequent ones.
    """
    result = torch.full((groups, log_values.shape[1]), NEG_INF, dtype=log_values.dtype, device=log_values.device)
    counts = group.bincount(minlength=groups)
    for large in (counts > _LARGE_GROUP).nonzero().flatten().tolist():
        values = log_values[group == large]
        peak = values.amax(0)
        peak = torch.where(peak > NEG_INF, peak, 0.0)
        result[large] = (values.sub_(peak).exp_().sum(0, dtype=torch.float64).log() + peak).to(log_values)
    rest = (counts <= _LARGE_GROUP)[group]
    log_values, group = log_values[rest], group[rest]
    peak = result.scatter_reduce(0, group[:, None].expand_as(log_values), log_values, "amax")
    peak = torch.where(peak > NEG_INF, peak, 0.0)
    relative = (log_values - peak[group]).exp_().double()
    total = torch.zeros_like(peak, dtype=torch.float64).index_add(0, group, relative)
    small = (total.log() + peak).to(log_values)
    return torch.where((counts > _LARGE_GROUP)[:, None], result, small)
