"""Log-likelihood of a blocked HMM whose transition is softmax(u wᵀ), normalized over the states at hand."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.ops.blocked_scan.api import blocked_scan, check, recompute_suspects
from hmmlm.ops.blocked_scan.problem import CarriedRows, Factors, lay_out
from hmmlm.ops.blocked_scan.table import fits, table_scan
from hmmlm.ops.common import Carry, Scan, product_dtype
from hmmlm.ops.linear_logsumexp import linear_logsumexp, split_linear_logsumexp
from hmmlm.ranks import world


class Features(NamedTuple):
    """Parameters of an HMM with M blocks of k states, as in `Factors`, where A = softmax(u wᵀ)."""

    block_of_word: Tensor  # [V]
    u: Tensor  # [Z, h]
    w: Tensor  # [Z, h]
    log_start: Tensor  # [Z]
    log_emission: Tensor  # [V, k]

    def factors(self, normalizers: Callable[[Tensor, Tensor], Tensor] = linear_logsumexp) -> Factors:
        """Return the factors with their normalizers."""
        return Factors(*self[:3], normalizers(self.u, self.w), *self[3:])


class CarriedFeatures(NamedTuple):
    """The carry of a window, and the features of the carried states; see `CarriedRows`."""

    filtered: Tensor  # [B, kept_then]
    u: Tensor  # [N, kept_then, h]
    group: Tensor | None  # [B] group 0..N−1 of each sequence; None: its own (N = B), or the only one (N = 1)

    def normalized(self, w: Tensor) -> CarriedRows:
        """Return the rows with their normalizers against w [Z, h]."""
        log_normalizer = linear_logsumexp(self.u.flatten(0, 1), w).view(self.u.shape[:2])
        return CarriedRows(self.filtered, self.u, log_normalizer, self.group)


def softmax_scan(
    features: Features,
    tokens: Tensor,
    *,
    carried: CarriedFeatures | None = None,
    lengths: Tensor | None = None,
    restart: Tensor | None = None,
    next_words: Tensor | None = None,
) -> Scan:
    """Compute what `blocked_scan` computes, from features. On a CPU, a table of all transitions is kept if it fits."""
    u, w, kept = features.u, features.w, features.log_emission.shape[1]
    rows = u.shape[0] + (0 if carried is None else carried.u.shape[0] * kept)
    narrow = product_dtype(u) != u.dtype or u.dtype != w.dtype
    then = kept if carried is None else carried.u.shape[1]
    # Several processes divide the normalizers instead, and all of them must do the same.
    several = world().count > 1
    if several or next_words is not None or narrow or then != kept or not fits(rows, len(w), u):
        before = None if carried is None else carried.normalized(w)
        factors = features.factors(split_linear_logsumexp)
        return blocked_scan(factors, tokens, carried=before, lengths=lengths, restart=restart, next_words=next_words)
    leaving = u.view(-1, kept, u.shape[1])
    before, given = None, (features.log_start, features.log_emission)
    if carried is not None:
        leaving = torch.cat([leaving, carried.u])
        before = CarriedRows(carried.filtered, carried.u[..., :0], carried.u[..., 0], carried.group)
    # The problem has no factors: their width is zero.
    factors = Factors(features.block_of_word, u[:, :0], w[:, :0], torch.zeros_like(features.log_start), *given)
    check(factors, tokens, before, lengths, restart)
    problem = lay_out(factors, tokens, before, lengths, restart, u.dtype)
    result = table_scan(problem, leaving, w, *given, None if carried is None else carried.filtered)
    scan = Scan(result[0], Carry(result[1]), result[2])
    if not result[2].any():
        return scan
    before = None if carried is None else carried.normalized(w)
    return recompute_suspects(scan, features.factors(), tokens, before, lengths, restart)
