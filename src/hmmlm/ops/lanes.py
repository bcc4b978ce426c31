"""Vectors of a CPU's registers for compiled loops (numba): LANES neighboring numbers of a row of a matrix.

The compiler vectorizes a loop only if it can prove that its arrays do not overlap, and keeps no sums in registers from
one row of a matrix to the next. With these a product of small matrices takes a quarter of the time. Functions are
called from compiled code; matrices are C-contiguous, and their rows whole vectors. A tile is ROWS × `vectors` such
vectors, one or more side by side in every row, whose sums are independent: that hides the latency of additions.
"""
# mypy: allow-untyped-defs
# (arguments are types of numba or values of LLVM)

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8  # float32 numbers of one or two registers

ROWS = 8  # of a tile

_operation: Any = intrinsic  # its type is that of the function as the compiler sees it, with one argument more
_literal: Any = intrinsic(prefer_literal=True)  # whose integer arguments are known when it is compiled


class Lanes(types.Type):
    """The type of a vector, of float32 or float64 numbers."""

    def __init__(self, dtype: types.Float) -> None:
        self.dtype = dtype
        super().__init__(f"Lanes({dtype})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        number = ir.FloatType() if kind.dtype == types.float32 else ir.DoubleType()
        super().__init__(manager, kind, ir.VectorType(number, LANES))


@_operation
def load(_, matrix, row, column):
    """Return the numbers from matrix[row, column] on."""

    def generate(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], *args)
        return builder.load(pointer, align=signature.return_type.dtype.bitwidth // 8)

    return Lanes(matrix.dtype)(matrix, types.intp, types.intp), generate


@_operation
def store(_, matrix, row, column, lanes):
    """Write the numbers to matrix[row, column] and its neighbors."""

    def generate(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], *args[:3])
        builder.store(args[3], pointer, align=signature.args[3].dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(matrix, types.intp, types.intp, lanes), generate


@_operation
def repeat(_, number):
    """Return a number in every lane."""

    def generate(context, builder, signature, args):
        return _repeat(builder, context.get_value_type(signature.return_type), args[0])

    return Lanes(number)(number), generate


@_operation
def multiply(_, a, b):
    """Return a · b."""
    return a(a, a), lambda context, builder, signature, args: builder.fmul(*args)


@_operation
def add(_, a, b):
    """Return a + b."""
    return a(a, a), lambda context, builder, signature, args: builder.fadd(*args)


@_operation
def add_number(_, lanes, number):
    """Return lanes + number."""

    def generate(context, builder, signature, args):
        return builder.fadd(args[0], _repeat(builder, args[0].type, args[1]))

    return lanes(lanes, lanes.dtype), generate


@_operation
def maximum(_, a, b):
    """Return the larger of a and b; b where one of them is NaN."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return a(a, a), generate


@_operation
def zero_below(_, lanes, values, least):
    """Return the lanes, zero where `values` are less than `least` (not where they are NaN)."""

    def generate(context, builder, signature, args):
        below = builder.fcmp_ordered("<", args[1], _repeat(builder, args[0].type, args[2]))
        return builder.select(below, ir.Constant(args[0].type, None), args[0])

    return lanes(lanes, lanes, lanes.dtype), generate


@_operation
def drop_below(_, lanes, least):
    """Return the lanes, −inf where they are less than `least`."""

    def generate(context, builder, signature, args):
        below = builder.fcmp_ordered("<", args[0], _repeat(builder, args[0].type, args[1]))
        nothing = ir.Constant(args[0].type.element, float("-inf"))
        return builder.select(below, _repeat(builder, args[0].type, nothing), args[0])

    return lanes(lanes, lanes.dtype), generate


@_operation
def total(_, lanes):
    """Return the sum over lanes."""
    return lanes.dtype(lanes), _reduction(lambda builder, a, b: builder.fadd(a, b))


@_operation
def largest(_, lanes):
    """Return the largest lane."""
    return lanes.dtype(lanes), _reduction(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@_literal
def fill_tile(_, number, vectors):
    """Return a tile of ROWS × `vectors` vectors with a number everywhere."""
    tile = types.UniTuple(Lanes(number), ROWS * vectors.literal_value)

    def generate(context, builder, signature, args):
        vector = _repeat(builder, context.get_value_type(Lanes(number)), args[0])
        return _pack(builder, [vector] * tile.count)

    return tile(number, vectors), generate


@_operation
def store_tile(_, matrix, row, column, tile):
    """Write a tile to ROWS rows from matrix[row, column] on."""

    def generate(context, builder, signature, args):
        array, first, left, values = args
        for k, pointer in enumerate(_pointers(context, builder, signature.args[0], array, first, left, tile.count)):
            builder.store(builder.extract_value(values, k), pointer, align=tile.dtype.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(matrix, types.intp, types.intp, tile), generate


@_literal
def load_tile(_, matrix, row, column, vectors):
    """Return the tile of ROWS rows from matrix[row, column] on."""
    tile = types.UniTuple(Lanes(matrix.dtype), ROWS * vectors.literal_value)

    def generate(context, builder, signature, args):
        array, first, left, _ = args
        places = _pointers(context, builder, signature.args[0], array, first, left, tile.count)
        return _pack(builder, [builder.load(place, align=matrix.dtype.bitwidth // 8) for place in places])

    return tile(matrix, types.intp, types.intp, vectors), generate


@_operation
def add_products(_, tile, values, row, column, matrix, at):
    """Return the tile plus the products of ROWS numbers from values[row, column] down and the vectors of matrix[at]."""
    return _accumulation(_multiply_add, tile, values, matrix, down=True)


@_operation
def add_outer(_, tile, values, row, column, matrix, at, left):
    """Return the tile plus products of ROWS numbers from values[row, column] on and those from matrix[at, left]."""
    return _accumulation(_multiply_add, tile, values, matrix, down=False)


@_operation
def raise_to_sums(_, tile, values, row, column, matrix, at):
    """Return the larger of the tile and the sums of ROWS numbers from values[row, column] down and matrix[at]."""

    def combine(builder, total, number, vector):
        found = builder.fadd(number, vector)
        return builder.select(builder.fcmp_ordered(">", found, total), found, total)

    return _accumulation(combine, tile, values, matrix, down=True)


def _multiply_add(builder, total, number, vector):
    return builder.fadd(builder.fmul(number, vector, flags=("contract",)), total, flags=("contract",))


def _accumulation(combine, tile, values, matrix, down):
    """Return signature and code that combines each vector of a tile with a number of its row and a vector of a matrix.

    The numbers of the rows are below each other (`down`) or side by side. Vectors start at column 0 then, else at
    a column that is one argument more.
    """

    def generate(context, builder, signature, args):
        totals, numbers, row, column, source, at, *left = args
        vectors, size = tile.count // ROWS, tile.dtype.dtype.bitwidth // 8

        def beside(place, count):
            return builder.add(place, context.get_constant(types.intp, count))

        left = left[0] if left else context.get_constant(types.intp, 0)
        parts = [
            builder.load(_pointer(context, builder, matrix, source, at, beside(left, LANES * k)), align=size)
            for k in range(vectors)
        ]
        array, pieces = context.make_array(values)(context, builder, numbers), []
        for k in range(ROWS):
            place = [beside(row, k), column] if down else [row, beside(column, k)]
            number = builder.load(cgutils.get_item_pointer(context, builder, values, array, place, wraparound=False))
            factor = _repeat(builder, parts[0].type, number)
            pieces += [
                combine(builder, builder.extract_value(totals, k * vectors + i), factor, part)
                for i, part in enumerate(parts)
            ]
        return _pack(builder, pieces)

    places = (types.intp,) * (1 if down else 2)
    return tile(tile, values, types.intp, types.intp, matrix, *places), generate


def _pointers(context, builder, kind, array, row, column, count):
    """Return the addresses of the `count` vectors of a tile whose first is at [row, column] of a matrix."""
    for k in range(count):
        down, right = divmod(k, count // ROWS)
        place = builder.add(row, context.get_constant(types.intp, down))
        side = builder.add(column, context.get_constant(types.intp, LANES * right))
        yield _pointer(context, builder, kind, array, place, side)


def _pack(builder, vectors):
    """Return vectors as an array, the value of a tuple."""
    packed = ir.Constant(ir.ArrayType(vectors[0].type, len(vectors)), ir.Undefined)
    for k, vector in enumerate(vectors):
        packed = builder.insert_value(packed, vector, k)
    return packed


def _reduction(combine):
    """Return the code that combines the upper with the lower half of a vector until one number is left."""

    def generate(context, builder, signature, args):
        vector, half = args[0], LANES // 2
        while half:
            order = [*range(half, 2 * half), *range(half), *range(2 * half, LANES)]
            mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), order)
            vector = combine(builder, vector, builder.shuffle_vector(vector, vector, mask))
            half //= 2
        return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))

    return generate


def _pointer(context, builder, kind, matrix, row, column):
    array = context.make_array(kind)(context, builder, matrix)
    pointer = cgutils.get_item_pointer(context, builder, kind, array, [row, column], wraparound=False)
    return builder.bitcast(pointer, context.get_value_type(Lanes(kind.dtype)).as_pointer())


def _repeat(builder, vector, number):
    empty, first = ir.Constant(vector, ir.Undefined), ir.Constant(ir.IntType(32), 0)
    everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(builder.insert_element(empty, number, first), empty, everywhere)
