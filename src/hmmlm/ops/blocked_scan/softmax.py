"""Log-likelihood of a blocked HMM whose transition is softmax(u wᵀ), normalized over the states at hand."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.ops.blocked_scan.api import blocked_scan, check, recompute_suspects
from hmmlm.ops.blocked_scan.problem import Factors, lay_out
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


def softmax_scan(
    features: Features,
    tokens: Tensor,
    *,
    entry: Tensor | None = None,
    lengths: Tensor | None = None,
    restart: Tensor | None = None,
    next_words: Tensor | None = None,
) -> Scan:
    """Compute what `blocked_scan` computes, from features. On a CPU, a table of all transitions is kept if it fits."""
    u, w = features.u, features.w
    narrow = product_dtype(u) != u.dtype or u.dtype != w.dtype
    # Several processes divide the normalizers instead, and all of them must do the same.
    several = world().count > 1
    if several or next_words is not None or narrow or not fits(len(w), u):
        factors = features.factors(split_linear_logsumexp)
        return blocked_scan(factors, tokens, entry=entry, lengths=lengths, restart=restart, next_words=next_words)
    given = (features.log_start, features.log_emission)
    # The problem has no factors: their width is zero.
    factors = Factors(features.block_of_word, u[:, :0], w[:, :0], torch.zeros_like(features.log_start), *given)
    check(factors, tokens, entry, lengths, restart)
    problem = lay_out(factors, tokens, None if entry is None else entry[:, 0], lengths, restart, u.dtype)
    log_likelihood, carry, suspect = table_scan(problem, u, w, *given, entry)
    scan = Scan(log_likelihood, Carry(carry), suspect)
    return recompute_suspects(scan, features.factors(), tokens, entry, lengths, restart) if suspect.any() else scan
