"""Matrix products of packed vectors with a few rows, with sums in registers.

The inner loop of linears and attention. Columns are packed in vectors of 16 lanes. A step
multiplies one vector of a column with 4 bytes of each row, broadcast to all lanes: two bfloat16 or
one float32. Each sum adds its products in the order of the steps, for any tile size, so a result
does not depend on the rest of the tile.
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
    bfloat12,
    llvm,
    processor,
    vector,
)
from text_generation_shard.device.cpu.kernels.llvm import BYTES, INTS, VECTOR_BYTES
from text_generation_shard.device.cpu.kernels.vector import ADDRESS, INT8, INTERNAL, STEP_BYTES


def _magnitudes() -> list[list[llvm.Table]]:
    """Tables of the lower and upper bytes of bfloat16 0 to 127, two vectors each."""
    bits = np.arange(128, dtype=np.float32).view(np.uint32) >> 16
    tables = (np.split(part & 255, 2) for part in (bits, bits >> 8))
    return [[llvm.Table(BYTES, half.tolist()) for half in halves] for halves in tables]


(_LOWER_0, _LOWER_64), (_UPPER_0, _UPPER_64) = _magnitudes()
_WIDE_FLOATS: Final = llvm.Vector(types.float32, VECTOR_BYTES)
_WIDE_INTS: Final = llvm.Vector(types.int32, VECTOR_BYTES)
_SIGN: Final = -128
_HAS_BYTE_TABLES: Final = processor.has_byte_tables()


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
# 0 for INT4, see `grouped`.
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
