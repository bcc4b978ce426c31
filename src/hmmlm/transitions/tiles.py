"""Products of a transition matrix with rows of values that cover different states, from pieces of the matrix.

Rows that share their blocks share a piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hmmlm.numerics.semirings import LOG, row_pieces
from hmmlm.numerics.support import BlockSupport, Support
from hmmlm.ops.common import NEG_INF, logsumexp
from hmmlm.ops.pieces import at_once

if TYPE_CHECKING:
    from hmmlm.transitions.base import Transition


Reduce = Callable[[Tensor, Tensor], Tensor]
"""Maps values [b, K] and log A, one matrix [K, K'] or one for each row [b, K, K'], to [b, K']."""


def narrow(source: Support, target: Support) -> bool:
    """Return whether both supports are one block for each row."""
    return isinstance(source, BlockSupport) and isinstance(target, BlockSupport) and not source.wide and not target.wide


def span_of(block: int, width: int, states: int) -> slice:
    """Return the states of a block, or all states (−1)."""
    return slice(0, states) if block < 0 else slice(block * width, (block + 1) * width)


def contract(
    transition: Transition,
    reduce: Reduce,
    values: Tensor,
    inner: Support,
    outer: Support,
    forward: bool,
    zero: float = NEG_INF,
) -> Tensor:
    """Reduce values [n, K] over the states of `inner` with log A, for every state of `outer`: [n, K'].

    Args:
        forward: `inner` has the states that are left; otherwise those that are entered.
        zero: of the states outside a row's block.
    """
    groups = _groups(transition.num_states, inner, outer, values)
    if groups is None:
        assert isinstance(inner, BlockSupport) and isinstance(outer, BlockSupport)
        size, parts = at_once(inner.width**2), []
        for part, a, b in zip(values.split(size), inner.blocks.split(size), outer.blocks.split(size), strict=True):
            tiles = transition.tiles(a, b, inner.width) if forward else transition.tiles(b, a, inner.width).mT
            parts.append(reduce(part, tiles))
        return torch.cat(parts)
    states, width = transition.num_states, next((s.width for s in (inner, outer) if isinstance(s, BlockSupport)), 1)
    results = []
    for rows, a, b in groups:
        own, (left, right) = values[rows], (span_of(each, width, states) for each in (a, b))
        if own.shape[1] == states:
            own = own[:, left]
        found = None
        if reduce == LOG.reduce and len(rows) == 1 and not torch.is_grad_enabled():
            found = transition.reduce_row(own, left, right, forward)
        if found is None:
            found = torch.cat([reduce(own, piece) for piece in transition.pieces(left, right, forward)], 1)
        results.append(found)
    whole = not isinstance(outer, BlockSupport) or outer.wide
    if len(groups) == 1 and (groups[0][2] < 0 or not whole):
        return results[0]
    result = values.new_full((len(values), states if whole else width), zero)
    for (rows, _, block), found in zip(groups, results, strict=True):
        result[rows, span_of(block, width, states) if whole else slice(width)] = found
    return result


def _groups(states: int, inner: Support, outer: Support, values: Tensor) -> list[tuple[Tensor, int, int]] | None:
    """Group the rows that share both blocks, and so a piece of the matrix; None: compute a tile for each row."""
    rows, device = len(values), values.device
    if inner is None and outer is None:
        return [(torch.arange(rows, device=device), -1, -1)]
    if narrow(inner, outer) and (states // inner.width) ** 2 > rows:  # type: ignore[union-attr]
        return None
    everywhere = torch.full((rows,), -1, device=device)
    inners, outers = (s.blocks if isinstance(s, BlockSupport) else everywhere for s in (inner, outer))
    pairs, group = torch.stack([inners, outers], 1).unique(dim=0, return_inverse=True)
    return [((group == g).nonzero().squeeze(1), a, b) for g, (a, b) in enumerate(pairs.tolist())]


def entropy_of_sources(values: Tensor, log_tiles: Tensor) -> Tensor:
    """Compute the entropy [b, K'] of the source given each state of the target; see `Reduce`."""
    results = []
    for piece, tile in row_pieces(values, log_tiles):
        scores = piece[:, :, None] + tile
        total = logsumexp(scores, 1)[:, None]
        conditional = scores - torch.where(total == NEG_INF, 0.0, total)
        results.append(-torch.where(conditional == NEG_INF, 0.0, conditional.exp() * conditional).sum(1))
    return torch.cat(results)
