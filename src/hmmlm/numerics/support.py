"""Supports: the states that rows of values cover. In place of a support, None means all states in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.ops.common import NEG_INF


class BlockSupport(NamedTuple):
    """The states of one block for each row; block m has the states m·width to (m + 1)·width − 1.

    If some row covers all states, values are over all of them [n, Z], and −inf outside the blocks of the others.
    """

    blocks: Tensor  # [n]; −1: all states
    width: int
    wide: bool = False  # whether values are over all states, else over the `width` states of a block

    def rows(self, rows: slice | Tensor) -> BlockSupport:
        return self._replace(blocks=self.blocks[rows])

    def restrict(self, values: Tensor) -> Tensor:
        by_block = values.unflatten(1, (-1, self.width))
        if not self.wide:
            return by_block[torch.arange(len(values), device=values.device), self.blocks]
        return by_block.masked_fill(self.outside(by_block.shape[1])[..., None], NEG_INF).flatten(1)

    def outside(self, count: int) -> Tensor:
        """Return a mask [n, M] of the blocks, `count` in all, that a row does not cover."""
        every = torch.arange(count, device=self.blocks.device)
        return (self.blocks[:, None] != every) & (self.blocks >= 0)[:, None]

    def spread(self, values: Tensor, states: int, fill: float) -> Tensor:
        if self.wide:
            return values
        result = values.new_full((len(values), states // self.width, self.width), fill)
        result[torch.arange(len(values), device=values.device), self.blocks] = values
        return result.flatten(1)

    def state_ids(self, index: Tensor) -> Tensor:
        return index if self.wide else self.blocks * self.width + index


class UnionSupport(NamedTuple):
    """The supports of the components of a union; values over it are those of the components side by side."""

    parts: tuple[Support, ...]
    widths: tuple[int, ...]  # of the values of each component
    sizes: tuple[int, ...]  # states of each component

    def rows(self, rows: slice | Tensor) -> UnionSupport:
        return self._replace(parts=tuple(some_rows(part, rows) for part in self.parts))

    def restrict(self, values: Tensor) -> Tensor:
        pairs = zip(values.split(self.sizes, 1), self.parts, strict=True)
        return torch.cat([restrict(own, part) for own, part in pairs], 1)

    def spread(self, values: Tensor, states: int, fill: float) -> Tensor:
        pairs = zip(values.split(self.widths, 1), self.parts, self.sizes, strict=True)
        return torch.cat([spread(own, part, size, fill) for own, part, size in pairs], 1)

    def state_ids(self, index: Tensor) -> Tensor:
        result, starts = torch.zeros_like(index), zip(spans(self.widths), spans(self.sizes), strict=True)
        for (span, states), part in zip(starts, self.parts, strict=True):
            inside = (index >= span.start) & (index < span.stop)
            own = state_ids(part, torch.where(inside, index - span.start, 0))
            result = torch.where(inside, own + states.start, result)
        return result


Support = BlockSupport | UnionSupport | None


def restrict(values: Tensor, support: Support) -> Tensor:
    """Restrict values over all states [n, Z] to a support [n, K]."""
    return values if support is None else support.restrict(values)


def spread(values: Tensor, support: Support, states: int, fill: float) -> Tensor:
    """Return values [n, K] over a support as values over all `states` [n, Z], `fill` outside the support."""
    return values if support is None else support.spread(values, states, fill)


def state_ids(support: Support, index: Tensor) -> Tensor:
    """Return the states [..., n] at positions `index` [..., n] of a support."""
    return index if support is None else support.state_ids(index)


def some_rows(support: Support, rows: slice | Tensor) -> Support:
    return None if support is None else support.rows(rows)


def spans(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield the states of each component, of which there are `sizes`."""
    first = 0
    for size in sizes:
        yield slice(first, first + size)
        first += size
