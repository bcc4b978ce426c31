"""How much is computed at once: what does not fit in memory is computed in pieces.

Every module has a default for the size of its pieces, in numbers ("cells"). `limit` lowers all of them.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

MOST = 2**24
"""Largest intermediate where nothing else is known: 64 MB in float32."""

_limit = sys.maxsize


def at_once(cells: int, most: int = MOST) -> int:
    """Return how many rows of `cells` numbers each fit in a piece of `most` numbers; at least one."""
    return max(1, min(most, _limit) // max(1, cells))


def fits(cells: int, most: int = MOST) -> bool:
    """Return whether a table of `cells` numbers may be computed or kept whole."""
    return cells <= min(most, _limit)


@contextmanager
def limit(cells: int) -> Iterator[None]:
    """Bound every piece by `cells` numbers, but for its first row, in all threads; 0 excludes whole tables.

    Results are the same. With less memory than the defaults assume they take longer; tests reach the pieces of large
    models with small ones.
    """
    global _limit
    before, _limit = _limit, min(_limit, cells)
    try:
        yield
    finally:
        _limit = before
