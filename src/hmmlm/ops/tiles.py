"""Products of matrices in compiled loops (numba): tiles whose sums stay in registers.

A matrix [Z, W] is packed into strips of columns, as wide as a tile, so that what a tile reads lies in one piece: rows
whose length is a power of two would share few lines of the cache. Its columns beyond the Zth are padding.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import literally, njit

from hmmlm.ops import lanes
from hmmlm.ops.lanes import LANES, ROWS

VECTORS = 2 if LANES == 16 else 1  # of float32 numbers, side by side in a tile: as many as there are registers for
UNROLL = 4  # rows of a strip per iteration, which share the computation of addresses


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function: sums may be reordered and products fused; infinities and NaN keep their meaning."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package nor the home directory can be written to
        return njit(**options)(function)


def strip_width(states: int, dtype: np.dtype) -> int:
    """Return the width S of the strips of a matrix."""
    return LANES if states <= LANES or dtype.itemsize > 4 else LANES * VECTORS


def padded_width(states: int, dtype: np.dtype) -> int:
    """Return the smallest number W of columns that is a multiple of S and no less than `states`."""
    return -(-states // strip_width(states, dtype)) * strip_width(states, dtype)


def packed_shape(states: int, dtype: np.dtype) -> tuple[int, int]:
    """Return the shape [W / S · D, S] of the strips of a matrix [Z, W], with D the least multiple of UNROLL ≥ Z."""
    size = strip_width(states, dtype)
    return padded_width(states, dtype) // size * -(-states // UNROLL) * UNROLL, size


@compiled
def pack(matrix, transposed, strips):  # type: ignore[no-untyped-def]
    """Write a matrix [Z, W], or its transpose, to strips [W / S · D, S], one after the other, padded with zeros."""
    states, size = len(matrix), strips.shape[1]
    depth = len(strips) * size // matrix.shape[1]
    strips[:] = 0
    for first in range(0, matrix.shape[1], size):
        strip = first // size * depth
        if transposed:
            for k in range(min(size, states - first)):
                for i in range(states):
                    strips[strip + i, k] = matrix[first + k, i]
        else:
            for i in range(states):
                for k in range(size):
                    strips[strip + i, k] = matrix[i, first + k]


@compiled
def multiply(values, rows, strips, out):  # type: ignore[no-untyped-def]
    """Compute out = values @ matrix of the first `rows` rows, and of those that fill the last tile.

    Args:
        values, out: [R, W] with R a multiple of ROWS; values are zero in columns of the padding.
        strips: of the matrix; see `pack`.
    """
    if strips.shape[1] > LANES:
        _multiply(values, rows, strips, out, VECTORS)
    else:
        _multiply(values, rows, strips, out, 1)


@compiled
def multiply_max(values, rows, strips, out):  # type: ignore[no-untyped-def]
    """Compute out[b, j] = max_i values[b, i] + matrix[i, j]; see `multiply`. Padding of values is −inf."""
    if strips.shape[1] > LANES:
        _multiply_max(values, rows, strips, out, VECTORS)
    else:
        _multiply_max(values, rows, strips, out, 1)


@compiled
def _multiply(values, rows, strips, out, vectors):  # type: ignore[no-untyped-def]
    size, zero = strips.shape[1], strips.dtype.type(0)
    depth = len(strips) * size // out.shape[1]
    for column in range(0, out.shape[1], size):
        strip = column // size * depth
        for row in range(0, rows, ROWS):
            tile = lanes.fill_tile(zero, literally(vectors))
            for i in range(0, depth, UNROLL):
                for k in range(i, i + UNROLL):
                    tile = lanes.add_products(tile, values, row, k, strips, strip + k)
            lanes.store_tile(out, row, column, tile)


@compiled
def _multiply_max(values, rows, strips, out, vectors):  # type: ignore[no-untyped-def]
    size, nothing = strips.shape[1], strips.dtype.type(-np.inf)
    depth = len(strips) * size // out.shape[1]
    for column in range(0, out.shape[1], size):
        strip = column // size * depth
        for row in range(0, rows, ROWS):
            tile = lanes.fill_tile(nothing, literally(vectors))
            for i in range(0, depth, UNROLL):
                for k in range(i, i + UNROLL):
                    tile = lanes.raise_to_sums(tile, values, row, k, strips, strip + k)
            lanes.store_tile(out, row, column, tile)


@compiled
def add_outer_products(before, first, stride, after, steps, rows, out):  # type: ignore[no-untyped-def]
    """Add Σ_t,b before[first + t · stride + b, i] after[t, b, j] over steps t and rows b to out [R, W].

    Args:
        before: [n, W] with W ≥ R.
        after: [≥ steps, ≥ rows, W].
        out: with R a multiple of ROWS.
    """
    if out.shape[1] % (LANES * VECTORS) == 0:
        _add_outer_products(before, first, stride, after, steps, rows, out, VECTORS)
    else:
        _add_outer_products(before, first, stride, after, steps, rows, out, 1)


@compiled
def _add_outer_products(before, first, stride, after, steps, rows, out, vectors):  # type: ignore[no-untyped-def]
    whole = rows - rows % UNROLL
    for column in range(0, out.shape[1], LANES * vectors):
        for row in range(0, len(out), ROWS):
            tile = lanes.load_tile(out, row, column, literally(vectors))
            for t in range(steps):
                for i in range(0, whole, UNROLL):
                    for b in range(i, i + UNROLL):
                        tile = lanes.add_outer(tile, before, first + t * stride + b, row, after[t], b, column)
                for b in range(whole, rows):
                    tile = lanes.add_outer(tile, before, first + t * stride + b, row, after[t], b, column)
            lanes.store_tile(out, row, column, tile)
