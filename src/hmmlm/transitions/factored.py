"""A transition with factored logits: A = softmax(u wᵀ)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.numerics.distributions import check_finite, check_totals
from hmmlm.ops.linear_logsumexp import linear_logsumexp
from hmmlm.ops.pieces import at_once, fits
from hmmlm.transitions.tiled import TiledTransition

_VALIDATED_CELLS = 2**28  # products for the rows that `validate` computes
_TOLERANCE = 0.01  # of normalizers from TF32 products of large factors


class Factored(TiledTransition):
    """log A[i, j] = u_i · w_j − log_normalizer_i, with u, w [Z, h].

    The normalizer [Z] takes O(Z²h) to compute, so a model file keeps it. Of large models, tiles are computed where they
    are used.
    """

    kind = "factored"
    TENSORS: ClassVar[dict[str, str]] = {"u": "states, width", "w": "states, width", "log_normalizer": "states"}

    def __init__(self, u: Tensor, w: Tensor, log_normalizer: Tensor | None = None) -> None:
        self.u, self.w = u, w
        if log_normalizer is None:
            log_normalizer = linear_logsumexp(u, w)
        self.log_normalizer = log_normalizer
        self._check()
        self._prepare()

    @property
    def num_parameters(self) -> int:
        return self.u.numel() + self.w.numel()

    @property
    def keeps_matrix(self) -> bool:
        return fits(self.num_states**2) and not self.requires_grad

    def log_block(self, rows: slice, columns: slice) -> Tensor:
        return torch.addmm(-self.log_normalizer[rows, None], self.u[rows], self.w[columns].t())

    def log_entries(self, i: Tensor, j: Tensor) -> Tensor:
        u, w = (factor.index_select(0, each.flatten()) for factor, each in ((self.u, i), (self.w, j)))
        products = u.view(*i.shape, -1) * w.view(*j.shape, -1)
        return products.sum(-1) - self.log_normalizer.index_select(0, i.flatten()).view(i.shape)

    def make_tiles(self, sources: Tensor, targets: Tensor, width: int) -> Tensor:
        shape = (self.num_states // width, width)
        u, w = (factor.view(*shape, -1)[blocks] for factor, blocks in ((self.u, sources), (self.w, targets)))
        return u @ w.transpose(1, 2) - self.log_normalizer.view(shape)[sources][:, :, None]

    def tile_gradient(self, sources: Tensor, targets: Tensor, counts: Tensor) -> dict[str, Tensor]:
        shape = (self.num_states // counts.shape[1], counts.shape[1])
        u, w = (factor.view(*shape, -1) for factor in (self.u, self.w))
        grad_u = torch.zeros_like(u).index_add_(0, sources, counts @ w[targets])
        grad_w = torch.zeros_like(w).index_add_(0, targets, counts.mT @ u[sources])
        left = self.log_normalizer.new_zeros(shape).index_add_(0, sources, counts.sum(2), alpha=-1)
        return {"u": grad_u.view_as(self.u), "w": grad_w.view_as(self.w), "log_normalizer": left.flatten()}

    def reduce_row(self, values: Tensor, inner: slice, outer: slice, forward: bool) -> Tensor | None:
        if forward and self.tiles_into(inner, outer) is not None:
            return None
        if forward:
            return linear_logsumexp(self.w[outer], self.u[inner], values[0] - self.log_normalizer[inner])[None]
        return (linear_logsumexp(self.u[outer], self.w[inner], values[0]) - self.log_normalizer[outer])[None]

    def log_rows(self, states: Tensor) -> Tensor:
        return self.u[states] @ self.w.t() - self.log_normalizer[states][:, None]

    def _into(self, states: Tensor) -> Tensor:
        return self.w[states] @ self.u.t() - self.log_normalizer

    def _into_block(self, states: Tensor, blocks: Tensor, width: int) -> Tensor:
        table, shape = self.table(width), (self.num_states // width, width)
        if table is not None:
            return table.log_values[blocks.expand_as(states), states // width, :, states % width]
        u, normalizer = self.u.view(*shape, -1)[blocks], self.log_normalizer.view(shape)[blocks]
        return torch.einsum("nkh,...nh->...nk", u, self.w[states]) - normalizer

    def maximize(self, counts: dict[str, Tensor], pseudocount: float = 0.0) -> Factored:
        raise InputError("a factored transition has no closed M step: train it by gradients")

    def validate(self) -> None:
        """Raise an InputError that names the first state whose transitions do not sum to one.

        Of a matrix so large that this would take longer than reading the model, rows spread over all states; the
        normalizers of the others must be within bounds, which any wrong number leaves that is wrong by far.
        """
        u, w, log_normalizer = (value.detach() for value in (self.u, self.w, self.log_normalizer))
        for name, value in self.tensors().items():
            check_finite(value, self._name(name))
        # Jensen's inequality from below, Cauchy and Schwarz's from above.
        least, most = u @ w.mean(0), u.norm(dim=1) * w.norm(dim=1).max()
        slack, log_states = _TOLERANCE + 1e-4 * most, math.log(self.num_states)
        least, most = least + log_states - slack, most + log_states + slack
        outside = (~((least <= log_normalizer) & (log_normalizer <= most))).nonzero().flatten().tolist()
        if outside:
            found, low, high = (float(values[outside[0]]) for values in (log_normalizer, least, most))
            raise InputError(
                f"{self._name('log_normalizer')} of state {outside[0]} is {found:.4g}, but u and w allow {low:.4g} to "
                f"{high:.4g}: normalize it first"
            )
        stride = max(1, self.num_states * w.numel() // at_once(1, _VALIDATED_CELLS))
        scores = u[::stride] @ w.t() - log_normalizer[::stride, None]
        check_totals(
            scores.exp_().sum(1),
            _TOLERANCE,
            lambda row: f"the transition from state {row * stride} by u, w and log_normalizer",
        )
