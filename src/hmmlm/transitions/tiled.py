"""Transitions of which the matrix, or its tiles between blocks, are kept: dense and factored ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from torch import Tensor

from hmmlm.device import total_memory
from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.numerics.semirings import LOG, Semiring
from hmmlm.numerics.support import Support
from hmmlm.ops.pieces import fits
from hmmlm.transitions.base import Transition
from hmmlm.transitions.tiles import narrow, span_of
from hmmlm.transitions.tilestore import TileStore

TABLE_CELLS = 2**22  # up to this size all tiles are computed once and kept
_STORED_SHARE = 1 / 8  # of the memory of the machine, for tiles that queries on a CPU keep


class TiledTransition(Transition):
    """A transition whose steps are products with log A, or with tiles of it."""

    _matrices: dict[bool, LogMatrix]
    _tables: dict[tuple[int, bool], LogMatrix]
    _stores: dict[int, TileStore]

    def _prepare(self) -> None:
        """Create the empty caches."""
        self._matrices, self._tables, self._stores = {}, {}, {}

    @property
    @abstractmethod
    def keeps_matrix(self) -> bool:
        """Whether log A is kept whole."""

    def matrix(self, forward: bool = True) -> LogMatrix:
        """Return log A [Z, Z], or its transpose, prepared for products."""
        if forward not in self._matrices:
            log_probs = self.dense()
            self._matrices[forward] = LogMatrix(log_probs if forward else log_probs.t().contiguous())
        return self._matrices[forward]

    def forward_step(self, ring: Semiring, x: Tensor, source: Support = None, target: Support = None) -> Tensor:
        if source is None and target is None and self.keeps_matrix:
            return ring.product(x, self.matrix(), normalized=True)
        if ring is LOG and narrow(source, target):
            table = self.table(source.width)  # type: ignore[union-attr]
            if table is not None:
                return table.product_by_row(x, (source.blocks, target.blocks))  # type: ignore[union-attr]
            if self.device.type == "cpu" and not self.requires_grad:
                return self.store(source.width).product(x, source.blocks, target.blocks)  # type: ignore[union-attr]
        return super().forward_step(ring, x, source, target)

    def backward_step(self, ring: Semiring, y: Tensor, source: Support = None, target: Support = None) -> Tensor:
        if source is None and target is None and self.keeps_matrix:
            return ring.product(y, self.matrix(forward=False))
        if ring is LOG and narrow(source, target):
            table = self.table(source.width, forward=False)  # type: ignore[union-attr]
            if table is not None:
                return table.product_by_row(y, (source.blocks, target.blocks))  # type: ignore[union-attr]
        return super().backward_step(ring, y, source, target)

    # --- tiles between blocks ---

    def table(self, width: int, forward: bool = True) -> LogMatrix | None:
        """Return log A, or its transpose, as tiles [M, M, k, k]; None if it is large or requires a gradient."""
        if self.requires_grad or not fits(self.num_states**2, TABLE_CELLS):
            return None
        found = self._tables.get((width, forward))
        if found is None:
            tiles = self.dense().view(-1, width, self.num_states // width, width).transpose(1, 2)
            found = self._tables[width, forward] = LogMatrix((tiles if forward else tiles.mT).contiguous())
        return found

    def tiles(self, sources: Tensor, targets: Tensor, width: int) -> Tensor:
        table = self.table(width)
        return self.make_tiles(sources, targets, width) if table is None else table.log_values[sources, targets]

    def pieces(self, inner: slice, outer: slice, forward: bool = True) -> Iterator[Tensor]:
        tiles = self.tiles_into(inner, outer) if forward else None
        if tiles is None:
            yield from super().pieces(inner, outer, forward)
        else:
            yield tiles.flatten(0, 1)

    def tiles_into(self, inner: slice, outer: slice) -> Tensor | None:
        """Return log A [M, k, k] from all states into a block; None if not all tiles are kept."""
        width = outer.stop - outer.start
        table = self.table(width) if inner.stop - inner.start == self.num_states > width else None
        return None if table is None else table.log_values[:, outer.start // width]

    @abstractmethod
    def make_tiles(self, sources: Tensor, targets: Tensor, width: int) -> Tensor:
        """Compute log A [n, k, k] between pairs of blocks [n]."""

    @abstractmethod
    def tile_gradient(self, sources: Tensor, targets: Tensor, counts: Tensor) -> dict[str, Tensor]:
        """Return the gradients of the tensors from those of log A [n, k, k] between different pairs of blocks [n]."""

    def store(self, width: int) -> TileStore:
        """Return the tiles between the first pairs of blocks that are asked for, as many as there is room for."""
        if width not in self._stores:
            states = self.num_states
            room = int(_STORED_SHARE * total_memory(self.device)) // (width**2 * self.dtype.itemsize)
            self._stores[width] = TileStore(
                lambda *pair: self.log_block(*(span_of(block, width, states) for block in pair)), states // width, room
            )
        return self._stores[width]
