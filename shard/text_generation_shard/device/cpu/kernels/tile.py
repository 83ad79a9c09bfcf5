"""Matrix products of packed vectors with a few rows, with sums in registers.

The inner loop of linears and attention. Columns are packed in vectors of 16 lanes. A step
multiplies one vector of a column with 4 bytes of each row, broadcast to all lanes: two bfloat16 or
one float32. Each sum adds its products in the order of the steps, for any tile size, so a result
does not depend on the rest of the tile. The epilogue of a product scales, gates, rounds and stores
the sums, in vectors.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import overload

from text_generation_shard.device.cpu.kernels import (
    Address,
    Count,
    Flag,
    are_vectors_wide,
    bfloat12,
    has_byte_tables,
    llvm,
    struct_type,
    vector,
)
from text_generation_shard.device.cpu.kernels.llvm import BYTES, FLOATS, INTS, LANES, VECTOR_BYTES
from text_generation_shard.device.cpu.kernels.vector import (
    ADDRESS,
    FLOAT32,
    INT8,
    INTERNAL,
    STEP_BYTES,
)

# A tile keeps its sums in registers: 8 x 3 of the 32 of AVX-512. Narrower vectors need two
# registers each, and there are fewer.
TILE_ROWS: Final = 8 if are_vectors_wide() else 4
TILE_COLUMNS: Final = 3 if are_vectors_wide() else 1
# Rows whose inputs stay in the second-level cache during a pass over the weights; whole tiles.
ROWS_AT_ONCE: Final = 240
# Vectors of sums per row of a tile: gates and ups.
SUMS_WIDTH: Final = 2 * TILE_COLUMNS
SUMS_BYTES: Final = SUMS_WIDTH * VECTOR_BYTES
MOST_PARTS: Final = 8
"""Most parts of a sum; a power of two."""
# A level of the tree that adds parts; and the levels that wait for a neighbour.
_LEVEL_VECTORS: Final = ROWS_AT_ONCE * SUMS_WIDTH
LEVEL_BYTES: Final = _LEVEL_VECTORS * VECTOR_BYTES
LEVELS_VECTORS: Final = 3 * _LEVEL_VECTORS
# Sign bit of a float32.
_FLOAT_SIGN: Final = -(2**31)


def _magnitudes() -> list[list[llvm.Table]]:
    """Tables of the lower and upper bytes of bfloat16 0 to 127, two vectors each."""
    bits = np.arange(128, dtype=np.float32).view(np.uint32) >> 16
    tables = (np.split(part & 255, 2) for part in (bits, bits >> 8))
    return [[llvm.Table(BYTES, half.tolist()) for half in halves] for halves in tables]


(_LOWER_0, _LOWER_64), (_UPPER_0, _UPPER_64) = _magnitudes()
_WIDE_FLOATS: Final = llvm.Vector(types.float32, VECTOR_BYTES)
_WIDE_INTS: Final = llvm.Vector(types.int32, VECTOR_BYTES)
_SIGN: Final = -128
_HAS_BYTE_TABLES: Final = has_byte_tables()


def _unpack_vector(kind: Any, start: int, offset: int, ahead: int, is_ahead: bool) -> Any:
    return (llvm.load(INTS, start + offset),)


def _unpack_bytes(kind: Any, start: int, offset: int, ahead: int, is_ahead: bool) -> Any:
    """Convert 64 int8, as packed by `matrices.pack`, to pairs of bfloat16, exactly."""
    if is_ahead:
        llvm.fetch(start + offset + ahead)
    numbers = llvm.load(BYTES, start + offset)
    lower, upper = look_up_magnitudes(numbers) if _HAS_BYTE_TABLES else convert_magnitudes(numbers)
    upper = upper | (numbers & _SIGN)
    return vector.pairs_of_bytes(lower, upper, 0), vector.pairs_of_bytes(lower, upper, 1)


@vector.inlined
def look_up_magnitudes(numbers: Any) -> Any:
    """The lower and upper bytes of the bfloat16 of 7-bit magnitudes."""
    lower = vector.look_up_bytes(_LOWER_0, numbers, _LOWER_64)
    return lower, vector.look_up_bytes(_UPPER_0, numbers, _UPPER_64)


@vector.inlined
def convert_magnitudes(numbers: Any) -> Any:
    """`look_up_magnitudes` without AVX512_VBMI."""
    bits = llvm.reinterpreted(_WIDE_INTS, llvm.converted(_WIDE_FLOATS, numbers & ~_SIGN))
    # A bfloat16 is the upper half of a float32.
    return llvm.converted(BYTES, bits >> 16), llvm.converted(BYTES, bits >> 24)


def _unpack_codes(kind: Any, start: int, offset: int, ahead: int, is_ahead: bool) -> Any:
    if is_ahead:
        for part in range(0, bfloat12.STEPS * bfloat12.STEP_BYTES, VECTOR_BYTES):
            llvm.fetch(start + offset + ahead + part)
    return bfloat12.decoded(start + offset)


class _Layout(NamedTuple):
    """Memory layout of the vectors of a column."""

    # Bytes per step, and steps per call of `unpack`, which divide the steps of a column.
    step_bytes: int
    steps: int
    unpack: Callable[..., Any]
    # Tiles of up to this number of rows prefetch the weights of the next tile. It helps where the
    # hardware prefetcher fails: with several columns at once, each a short stream; or if decoding
    # takes long between two loads.
    fetching_rows: int = 0


_LAYOUTS: Final = {
    types.uint16: _Layout(VECTOR_BYTES, 1, _unpack_vector),
    types.float32: _Layout(VECTOR_BYTES, 1, _unpack_vector),
    types.int8: _Layout(VECTOR_BYTES // 2, 2, _unpack_bytes, fetching_rows=2),
    types.int16: _Layout(bfloat12.STEP_BYTES, bfloat12.STEPS, _unpack_codes, fetching_rows=16),
}
# `_Layout` fields by kind of weights, for compiled code.
# 0 for INT4, see `multiply`.
bytes_per_step = llvm.constant_of_type(
    lambda kind: _LAYOUTS[kind].step_bytes if kind in _LAYOUTS else 0
)
_steps_at_once = llvm.constant_of_type(lambda kind: _LAYOUTS[kind].steps)
_fetching_rows = llvm.constant_of_type(lambda kind: _LAYOUTS[kind].fetching_rows)


# A declaration: compiled code calls the function that `overload` returns.
def _unpack(kind: Any, start: int, offset: int, ahead: int, is_ahead: bool) -> Any:
    """Unpack the vectors, INTS, of the next steps at `offset` of a column at address `start`;
    is_ahead: also prefetch `ahead` bytes further."""
    raise NotImplementedError


@overload(_unpack, {"forceinline": True, "error_model": "numpy"}, strict=False)
def _choose_unpack(
    kind: Any, start: Any, offset: Any, ahead: Any, is_ahead: Any
) -> Callable[..., Any]:
    return _LAYOUTS[kind].unpack


def sized(function: Callable[..., None], rows: int, columns: int) -> Any:
    """The compiled kernel of a tile of this size. Its name has the size: numba tells functions of
    one name apart by a number that counts from 1 in each process, and code of several processes
    comes together in the cache. There the tile of one size would be taken for that of another."""
    function.__name__ += f"_{rows}_{columns}"
    function.__qualname__ += f"_{rows}_{columns}"
    return njit(**INTERNAL)(function)


def by_size(kernels: Mapping[int, Any]) -> Any:
    """A function (size, arguments) that calls the kernel of this size, without inlining; the last
    one for all other sizes."""
    (own, kernel), *others = kernels.items()
    rest: Any = by_size(dict(others)) if others else None

    def call_one(size: int, arguments: Any) -> None:
        if size == own:
            llvm.outlined(kernel, arguments)
        else:
            rest(size, arguments)

    def call_last(size: int, arguments: Any) -> None:
        llvm.outlined(kernel, arguments)

    function = call_one if others else call_last
    # One name for each choice, see `sized`.
    function.__name__ = function.__qualname__ = "_or_".join(
        kernel.__name__ for kernel in kernels.values()
    )
    return vector.inlined(function)


@cache
def tile(rows: int, columns: int) -> Any:
    """Create the kernel of a tile of this size, with rows * columns vectors of sums in registers.

    Arguments: the kind of the vectors; a tuple of addresses of the columns; inputs, of the same
    kind or bfloat16, and output sums, float32 [rows, columns * 16], as addresses and strides in
    bytes. A kind with `fetching_rows` requires contiguous columns and tiles.
    """

    def multiply_tile(
        kind: Any, starts: Any, inputs: int, stride: int, steps: int, sums: int, sums_stride: int
    ) -> None:
        step_bytes, is_ahead = bytes_per_step(kind), rows <= _fetching_rows(kind)
        totals = vector.no_sums(rows, columns)
        for step in range(0, steps, _steps_at_once(kind)):
            where = step * step_bytes, steps * step_bytes * columns, is_ahead
            at = inputs + step * STEP_BYTES
            totals = vector.add_steps(kind, totals, _unpack, starts, where, at, stride)
        vector.store_sums(totals, columns, sums, sums_stride)

    return sized(multiply_tile, rows, columns)


class Pages(NamedTuple):
    """Vectors in several places, in order."""

    # [num_pages] addresses, int64.
    pages: Address
    num_pages: Count
    # In each page: offset of the first column, bytes from one column to the next, steps of a
    # column.
    offset: Count
    column_bytes: Count
    steps: Count


@cache
def paged_tile(rows: int, columns: int) -> Any:
    """`tile` for columns in pages; adds to the sums."""

    def add_pages(
        kind: Any, pages: Pages, inputs: int, stride: int, sums: int, sums_stride: int
    ) -> None:
        totals = vector.load_sums(rows, columns, sums, sums_stride)
        for page in range(pages.num_pages):
            start = llvm.array_at(ADDRESS, pages.pages)[page] + pages.offset
            starts = vector.spaced(columns, start, pages.column_bytes)
            first = inputs + page * pages.steps * STEP_BYTES
            for step in range(0, pages.steps, _steps_at_once(kind)):
                where, at = (step * bytes_per_step(kind), 0, False), first + step * STEP_BYTES
                totals = vector.add_steps(kind, totals, _unpack, starts, where, at, stride)
        vector.store_sums(totals, columns, sums, sums_stride)

    return sized(add_pages, rows, columns)


@vector.inlined
def dequantize(vectors: int, steps: int, target: int) -> None:
    """Convert `steps` steps of a packed int8 column to bfloat16."""
    for step in range(0, steps, 2):
        first, second = _unpack(INT8, vectors, step * VECTOR_BYTES // 2, 0, False)
        llvm.store(first, target + step * VECTOR_BYTES)
        llvm.store(second, target + (step + 1) * VECTOR_BYTES)


class Product(NamedTuple):
    """out [num_rows, num_outputs] = inputs [num_rows, steps] times packed weights."""

    weights: Address
    # INT8: scales, float32 [num_outputs]; BFLOAT12: see `bfloat12.Narrowed`; INT4: input sums of
    # groups, see `multiply`; others: 0.
    beside: Address
    inputs: Address
    out: Address
    num_rows: Count
    # Steps of STEP_BYTES of a row.
    steps: Count
    num_outputs: Count
    # Whether the weight is gated, see PackedWeight.
    is_gated: Flag
    # Not for gated weights. Number of equal parts of a sum, which are added pairwise: see
    # `num_parts`; and whether `out` is float32 for any kind of rows, for an exchange between ranks.
    num_parts: Count = 1
    is_partial: Flag = False


PRODUCT: Final = struct_type(Product)


class Outputs(NamedTuple):
    """Some outputs of a product: `columns` panels from `panel`. `sums`: address of their sums, rows
    of SUMS_BYTES."""

    product: Product
    panel: Count
    columns: Count
    sums: Address


@vector.inlined
def num_panels(num_outputs: int) -> int:
    """Panels of LANES outputs."""
    return -(-num_outputs // LANES)


@vector.inlined
def clear(sums: int, rows: int, columns: int) -> None:
    """Set the sums of a tile to 0."""
    for row in range(rows):
        numbers = llvm.array_at(FLOAT32, sums + row * SUMS_BYTES)
        for lane in range(columns * LANES):
            numbers[lane] = FLOAT32


def num_parts(num_inputs: int, part: int | None, unit: int) -> int:
    """Number of parts of a sum over a rank's inputs, with `part` inputs each, doubled until it is a
    multiple of `unit`; 1 if they are no branch of a tree, or `part` is None.

    Parts have equal size. Each part is summed in the order of its inputs; then a binary tree adds
    neighbouring parts. A rank with some of the parts computes a branch of the tree. So the sum over
    all ranks has the same bits for any number of ranks, if the number of parts is the same power of
    two.
    """
    if part is None:
        return 1
    while part % unit:
        part *= 2
    count = num_inputs // part
    is_branch = num_inputs % part == 0 and count in (1, 2, 4, MOST_PARTS)
    return count if is_branch else 1


@vector.inlined
def add_part(weight_kind: Any, own: Outputs, part: int, rows: int, levels: int) -> None:
    """Add the sums of `rows` rows over one part to the tree at `levels`: a level holds the sum of
    2 ** level parts that waits for its neighbour. The last part puts the whole sums in place."""
    scales = own.product.beside + _scales_at(weight_kind, own.product, own.panel, part)
    distance = _scales_at(weight_kind, own.product, 1, 0)
    for row in range(rows):
        for column in range(own.columns):
            offset = row * SUMS_BYTES + column * VECTOR_BYTES
            at, level, rest = own.sums + offset, levels + offset, part
            value = llvm.load(FLOATS, at)
            if has_scales(weight_kind):
                value = value * llvm.load(FLOATS, scales + column * distance)
            while rest & 1:
                value = llvm.load(FLOATS, level) + value
                level += LEVEL_BYTES
                rest >>= 1
            llvm.store(value, at if part == own.product.num_parts - 1 else level)


@vector.inlined
def _scales_at(weight_kind: Any, product: Product, panel: int, part: int) -> int:
    """Offset of the scales of a panel: with 12 bits, each part has its own."""
    if has_scales_of_parts(weight_kind):
        return (panel * product.num_parts + part) * VECTOR_BYTES
    return panel * VECTOR_BYTES


@njit(inline="always")
def store_rows(weight_kind: Any, kind: Any, own: Outputs, row: int, count: int) -> None:
    """Store the sums of `count` rows from `row` as outputs."""
    for index in range(count):
        if own.product.is_partial:
            _store_row(weight_kind, FLOAT32, own, row + index, index)
        else:
            _store_row(weight_kind, kind, own, row + index, index)


@vector.inlined
def _store_row(weight_kind: Any, kind: Any, own: Outputs, row: int, index: int) -> None:
    """Store one row's sums, the row `index` of them. With two halves, each vector of sums of gates
    is followed by one of ups; scales likewise. Sums of several parts are scaled already."""
    product, sums = own.product, own.sums + index * SUMS_BYTES
    halves = 2 if product.is_gated else 1
    scales = product.beside + halves * own.panel * VECTOR_BYTES if product.num_parts == 1 else 0
    for column in range(own.columns):
        offset, output = halves * column * VECTOR_BYTES, (own.panel + column) * LANES
        value = _scaled(weight_kind, sums, scales, offset)
        if halves == 2:
            up = _scaled(weight_kind, sums, scales, offset + VECTOR_BYTES)
            value = _silu(kind, value) * up
        to = product.out + (row * product.num_outputs + output) * llvm.itemsize(kind)
        vector.store_numbers(kind, value, to, min(LANES, product.num_outputs - output))


@vector.inlined
def _scaled(weight_kind: Any, sums: int, scales: int, offset: int) -> Any:
    value = llvm.load(FLOATS, sums + offset)
    if has_scales(weight_kind) and scales != 0:
        return value * llvm.load(FLOATS, scales + offset)
    return value


has_scales = llvm.constant_of_type(lambda kind: kind in (types.int8, types.int16))
has_scales_of_parts = llvm.constant_of_type(lambda kind: kind == types.int16)


@vector.inlined
def _silu(kind: Any, gate: Any) -> Any:
    """gate / (1 + e ** -gate), computed with a non-positive exponent."""
    below = llvm.reinterpreted(FLOATS, llvm.reinterpreted(INTS, gate) | _FLOAT_SIGN)
    small = vector.exponential(kind, below)
    return llvm.chosen(gate >= 0.0, gate, gate * small) / (small + 1.0)
