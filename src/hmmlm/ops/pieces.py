"""How much is computed at once, in numbers ("cells"): each caller has a default, and `limit` lowers all of them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

MOST = 2**24  # 64 MB in float32
_limit = sys.maxsize


def at_once(cells: int, most: int = MOST) -> int:
    """Return how many rows of `cells` numbers each fit in a piece of `most` numbers; at least one."""
    room = most if most < _limit else _limit  # written for speed: some steps of recursions ask
    return room // (cells or 1) or 1


def fits(cells: int, most: int = MOST) -> bool:
    """Return whether a table of `cells` numbers may be computed or kept whole."""
    return cells <= most and cells <= _limit


@contextmanager
def limit(cells: int) -> Iterator[None]:
    """Bound the pieces by `cells` numbers, in all threads; a piece has at least one row.

    Results are the same, with less memory and more time. Tests reach the pieces of large models with small ones.
    """
    global _limit
    before, _limit = _limit, min(_limit, cells)
    try:
        yield
    finally:
        _limit = before
