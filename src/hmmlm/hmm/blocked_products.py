"""Products of a blocked HMM's transition matrix with rows of values that cover different states.

Rows that share their blocks share a tile of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hmmlm.hmm.protocol import Support
from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.ops.common import NEG_INF, logsumexp
from hmmlm.ops.linear_logsumexp import linear_logsumexp

if TYPE_CHECKING:
    from hmmlm.hmm.blocked import BlockedHMM

_CELLS = 2**24  # largest table of sums computed at once


class BlockSupport(NamedTuple):
    """The states of one block, or all states, for each row."""

    blocks: Tensor  # [n]; −1: all states
    wide: bool  # values are over all Z states, −inf outside a row's block; else over the k states of its block

    def rows(self, rows: slice) -> BlockSupport:
        return BlockSupport(self.blocks[rows], self.wide)


def narrow(source: Support, target: Support) -> bool:
    """Return whether both supports are one block per row."""
    return source is not None and target is not None and not source.wide and not target.wide


def reduce_sources(
    hmm: BlockedHMM,
    values: Tensor,
    source: Support,
    target: Support,
    reduce: Callable[[Tensor, Tensor], Tensor],
    reduce_row: Callable[[BlockedHMM, Tensor, slice, slice], Tensor] | None = None,
) -> Tensor:
    """Reduce values [n, K] over the source with log A into every state of the target: [n, K'].

    `reduce` maps values [b, K] and tiles [b or none, K, K'] to [b, K']; `reduce_row`, if any, does the same for
    values [1, K], source and target without a tile.
    """
    groups = _groups(hmm, source, target, len(values))
    if groups is None:
        size = max(1, _CELLS // hmm.states_per_block**2)
        parts = zip(values.split(size), source.blocks.split(size), target.blocks.split(size), strict=True)
        return torch.cat([reduce(part, hmm.tiles(a, c)) for part, a, c in parts])
    results = []
    for rows, a, c in groups:
        own = values[rows]
        if own.shape[1] == hmm.states:
            own = own[:, hmm.span(a)]
        between = hmm.span(a), hmm.span(c)
        if reduce_row is not None and len(rows) == 1 and not torch.is_grad_enabled():
            results.append(reduce_row(hmm, own, *between))
        else:
            results.append(torch.cat([reduce(own, tile) for _, tile in hmm.pieces(*between)], 1))
    return _assemble(hmm, groups, results, [c for _, _, c in groups], target)


def reduce_targets(hmm: BlockedHMM, log_values: Tensor, source: Support, target: Support) -> Tensor:
    """Compute log Σ_j A[i, j] v_j [n, K] over the source for log_values [n, K'] over the target."""
    groups = _groups(hmm, source, target, len(log_values))
    if groups is None:
        size = max(1, _CELLS // hmm.states_per_block**2)
        parts = zip(log_values.split(size), source.blocks.split(size), target.blocks.split(size), strict=True)
        return torch.cat([logsumexp(hmm.tiles(a, c) + part[:, None, :], 2) for part, a, c in parts])
    results = []
    for rows, a, c in groups:
        own = log_values[rows]
        if own.shape[1] == hmm.states:
            own = own[:, hmm.span(c)]
        if a < 0 and c < 0 and hmm.backward_matrix is not None:
            results.append(hmm.backward_matrix.product(own))
            continue
        if len(rows) == 1 and not torch.is_grad_enabled():  # see `log_product_of_row`
            sums = linear_logsumexp(hmm.factors.u[hmm.span(a)], hmm.factors.w[hmm.span(c)], own[0])
            results.append((sums - hmm.factors.log_normalizer[hmm.span(a)])[None])
            continue
        total = torch.full_like(own[:, :1], NEG_INF)
        for part, tile in hmm.pieces(hmm.span(a), hmm.span(c)):
            total = torch.logaddexp(total, LogMatrix(tile.t()).product(own[:, part]))
        results.append(total)
    return _assemble(hmm, groups, results, [a for _, a, _ in groups], source)


def _groups(hmm: BlockedHMM, source: Support, target: Support, rows: int) -> list[tuple[Tensor, int, int]] | None:
    """Group the rows that share source and target, and so a tile; None: compute a tile for each row."""
    everywhere = torch.full((rows,), -1, device=hmm.device)
    sources = everywhere if source is None else source.blocks
    targets = everywhere if target is None else target.blocks
    if narrow(source, target) and not torch.is_grad_enabled() and hmm.blocks**2 > rows:
        return None
    pairs, group = torch.stack([sources, targets], 1).unique(dim=0, return_inverse=True)
    return [((group == g).nonzero().squeeze(1), a, c) for g, (a, c) in enumerate(pairs.tolist())]


def _assemble(
    hmm: BlockedHMM, groups: list[tuple[Tensor, int, int]], results: list[Tensor], blocks: list[int], support: Support
) -> Tensor:
    """Combine the rows of groups over a support; −inf outside a row's block."""
    order = torch.cat([rows for rows, _, _ in groups]).argsort()
    if support is None or support.wide:
        padded = []
        for block, values in zip(blocks, results, strict=True):
            span = hmm.span(block)
            padded.append(torch.nn.functional.pad(values, (span.start, hmm.states - span.stop), value=NEG_INF))
        results = padded
    return torch.cat(results)[order]


def log_product(values: Tensor, tiles: Tensor) -> Tensor:
    """Compute log Σ_i exp(values_i + tile_ij) [b, K'] for values [b, K]."""
    if tiles.dim() == 2 and not torch.is_grad_enabled():
        return LogMatrix(tiles).product(values)
    return logsumexp(values[:, :, None] + tiles, 1)


def log_product_of_row(hmm: BlockedHMM, values: Tensor, source: slice, target: slice) -> Tensor:
    """Compute `log_product` of values [1, K] in a third of the time: a tile is not worth preparing for one row."""
    factors = hmm.factors
    return linear_logsumexp(factors.w[target], factors.u[source], values[0] - factors.log_normalizer[source])[None]


def max_sum(values: Tensor, tiles: Tensor) -> Tensor:
    """Compute max_i values_i + tile_ij [b, K'] for values [b, K]; sums [b, K, K'] are taken in bounded pieces."""
    return torch.cat([(piece[:, :, None] + tile).amax(1) for piece, tile in _row_pieces(values, tiles)])


def _row_pieces(values: Tensor, tiles: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pieces of values [b, K] with their tiles: of one tile for all rows, pieces of _CELLS sums [·, K, K']."""
    if tiles.dim() == 3:
        yield values, tiles
    else:
        for piece in values.split(max(1, _CELLS // tiles.numel())):
            yield piece, tiles


def conditional_entropy(values: Tensor, tiles: Tensor) -> Tensor:
    """Compute the entropy [b, K'] of the source given each state of the target."""
    results = []
    for piece, tile in _row_pieces(values, tiles):
        scores = piece[:, :, None] + tile
        total = logsumexp(scores, 1)[:, None]
        conditional = scores - torch.where(total == NEG_INF, 0.0, total)
        results.append(-torch.where(conditional == NEG_INF, 0.0, conditional.exp() * conditional).sum(1))
    return torch.cat(results)
