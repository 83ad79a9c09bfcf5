"""Matrix products of packed vectors with a few rows, in registers.

The one loop behind linears and attention. What is multiplied lies in vectors of 16 lanes; a step
takes one vector of a column and, of each row, the 4 bytes that are multiplied with all of its
lanes: two bfloat16 or one float32. Each sum adds its products in the order of the steps, whatever
the size of the tile: a result never depends on what is computed beside it.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import overload

from text_generation_shard.device.cpu.kernels import bfloat12, processor, vector_code
from text_generation_shard.device.cpu.kernels.llvm import (
    BYTES,
    INTS,
    VECTOR_BYTES,
    Table,
    Vector,
    array_at,
    constant_of_type,
    converted,
    fetch,
    load,
    reinterpreted,
    store,
)
from text_generation_shard.device.cpu.kernels.structs import Address, Count
from text_generation_shard.device.cpu.kernels.vector import ADDRESS, INT8, STEP_BYTES, inlined


def _magnitudes() -> list[list[Table]]:
    """Tables of the lower and the upper bytes of the bfloat16 of 0 to 127, two vectors each."""
    bits = np.arange(128, dtype=np.float32).view(np.uint32) >> 16
    tables = (np.split(part & 255, 2) for part in (bits, bits >> 8))
    return [[Table(BYTES, half.tolist()) for half in halves] for halves in tables]


(_LOWER_0, _LOWER_64), (_UPPER_0, _UPPER_64) = _magnitudes()
_WIDE_FLOATS: Final = Vector(types.float32, VECTOR_BYTES)
_WIDE_INTS: Final = Vector(types.int32, VECTOR_BYTES)
_SIGN: Final = -128
_HAS_BYTE_TABLES: Final = processor.has_byte_tables()


def _unpack_vector(kind: Any, start: int, offset: int, ahead: int, is_ahead: bool) -> Any:
    return (load(INTS, start + offset),)


def _unpack_bytes(kind: Any, start: int, offset: int, ahead: int, is_ahead: bool) -> Any:
    """64 whole numbers of a byte, as `linear.pack` lays them out, are pairs of bfloat16, which hold
    them exactly."""
    if is_ahead:
        fetch(start + offset + ahead)
    numbers = load(BYTES, start + offset)
    lower, upper = look_up_magnitudes(numbers) if _HAS_BYTE_TABLES else convert_magnitudes(numbers)
    upper = upper | (numbers & _SIGN)
    return vector_code.pairs_of_bytes(lower, upper, 0), vector_code.pairs_of_bytes(lower, upper, 1)


@inlined
def look_up_magnitudes(numbers: Any) -> Any:
    """The lower and the upper bytes of the bfloat16 that magnitudes of 7 bits stand for."""
    lower = vector_code.look_up_bytes(_LOWER_0, numbers, _LOWER_64)
    return lower, vector_code.look_up_bytes(_UPPER_0, numbers, _UPPER_64)


@inlined
def convert_magnitudes(numbers: Any) -> Any:
    """`look_up_magnitudes` where AVX512_VBMI is missing."""
    bits = reinterpreted(_WIDE_INTS, converted(_WIDE_FLOATS, numbers & ~_SIGN))
    # A bfloat16 is the upper half of a float32.
    return converted(BYTES, bits >> 16), converted(BYTES, bits >> 24)


def _unpack_codes(kind: Any, start: int, offset: int, ahead: int, is_ahead: bool) -> Any:
    if is_ahead:
        for part in range(0, bfloat12.STEPS * bfloat12.STEP_BYTES, VECTOR_BYTES):
            fetch(start + offset + ahead + part)
    return bfloat12.decoded(start + offset)


class _Layout(NamedTuple):
    """How the vectors of a column lie in memory."""

    # Bytes of one step, and how many steps `unpack` takes from an address; the number of steps of a
    # column is a multiple of it.
    step_bytes: int
    steps: int
    unpack: Callable[..., Any]
    # Tiles of up to so many rows have what the tile behind them will read fetched meanwhile. Worth
    # it where the processor does not do so by itself: for several columns at once, each too short a
    # stream; and where between two vectors there is so much to do that it does not see a stream.
    fetching_rows: int = 0


_LAYOUTS: Final = {
    types.uint16: _Layout(VECTOR_BYTES, 1, _unpack_vector),
    types.float32: _Layout(VECTOR_BYTES, 1, _unpack_vector),
    types.int8: _Layout(VECTOR_BYTES // 2, 2, _unpack_bytes, fetching_rows=2),
    types.int16: _Layout(bfloat12.STEP_BYTES, bfloat12.STEPS, _unpack_codes, fetching_rows=16),
}
# Of a kind of weights; for compiled code.
bytes_per_step = constant_of_type(lambda kind: _LAYOUTS[kind].step_bytes)
_steps_at_once = constant_of_type(lambda kind: _LAYOUTS[kind].steps)
_fetching_rows = constant_of_type(lambda kind: _LAYOUTS[kind].fetching_rows)


# A name for compiled code: numba puts what `overload` returns in its place.
def _unpack(kind: Any, start: int, offset: int, ahead: int, is_ahead: bool) -> Any:
    """The vectors of the next steps, INTS, at an offset of a column that starts at an address;
    is_ahead: those that lie `ahead` bytes further on are brought into the cache."""
    raise NotImplementedError


@overload(_unpack, {"forceinline": True, "error_model": "numpy"}, strict=False)
def _choose_unpack(
    kind: Any, start: Any, offset: Any, ahead: Any, is_ahead: Any
) -> Callable[..., Any]:
    return _LAYOUTS[kind].unpack


# Neither Python nor `call` reaches them.
_OUTLINED: Final[Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


def tile(rows: int, columns: int) -> Any:
    """The function of a tile of this size; their product is how many sums are kept in registers.

    It takes the kind of the vectors; a tuple of the addresses of the columns; and inputs, of the
    same kind or bfloat16, and sums, float32 [rows, columns * 16], which are written, as addresses
    and strides in bytes. Only where columns lie one behind the other, and so do tiles, may vectors
    be of a kind that has rows to be fetched.
    """

    @njit(**_OUTLINED)
    def multiply_tile(
        kind: Any, starts: Any, inputs: int, stride: int, steps: int, sums: int, sums_stride: int
    ) -> None:
        step_bytes, is_ahead = bytes_per_step(kind), rows <= _fetching_rows(kind)
        totals = vector_code.no_sums(rows, columns)
        for step in range(0, steps, _steps_at_once(kind)):
            where = step * step_bytes, steps * step_bytes * columns, is_ahead
            at = inputs + step * STEP_BYTES
            totals = vector_code.add_steps(kind, totals, _unpack, starts, where, at, stride)
        vector_code.store_sums(totals, sums, sums_stride)

    return multiply_tile


class Pages(NamedTuple):
    """Vectors that lie in several places, one after another."""

    # [num_pages] addresses, int64.
    pages: Address
    num_pages: Count
    # In each page, where the vectors of the first column lie, from one column to the next, and of
    # how many steps they are.
    offset: Count
    column_bytes: Count
    steps: Count


def paged_tile(rows: int, columns: int) -> Any:
    """`tile` for columns that lie in pages, which sums grow by."""

    @njit(**_OUTLINED)
    def add_pages(
        kind: Any, pages: Pages, inputs: int, stride: int, sums: int, sums_stride: int
    ) -> None:
        totals = vector_code.load_sums(rows, columns, sums, sums_stride)
        for page in range(pages.num_pages):
            start = array_at(ADDRESS, pages.pages)[page] + pages.offset
            starts = vector_code.spaced(columns, start, pages.column_bytes)
            first = inputs + page * pages.steps * STEP_BYTES
            for step in range(0, pages.steps, _steps_at_once(kind)):
                where, at = (step * bytes_per_step(kind), 0, False), first + step * STEP_BYTES
                totals = vector_code.add_steps(kind, totals, _unpack, starts, where, at, stride)
        vector_code.store_sums(totals, sums, sums_stride)

    return add_pages


@inlined
def dequantize(vectors: int, steps: int, target: int) -> None:
    """Packed bytes, so many steps of one column, as the bfloat16 that they are multiplied with."""
    for step in range(0, steps, 2):
        first, second = _unpack(INT8, vectors, step * VECTOR_BYTES // 2, 0, False)
        store(first, target + step * VECTOR_BYTES)
        store(second, target + (step + 1) * VECTOR_BYTES)
