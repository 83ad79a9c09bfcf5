"""Vector arithmetic, one code for several kinds of numbers, and the steps of a tile.

The numba type of a marker is the kind: uint16 is bfloat16, float32 is itself. Rows are of one of
these two kinds; weights have more kinds.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from text_generation_shard.device.cpu.kernels import are_vectors_wide, has_bfloat16_products, llvm
from text_generation_shard.device.cpu.kernels.cache import choose_directory
from text_generation_shard.device.cpu.kernels.llvm import (
    FLOATS,
    INT32,
    INT64,
    INTS,
    LANES,
    SHORTS,
    VECTOR_BYTES,
)

# Here, because numba reads the setting when it decorates a cached function, and all files with such
# functions import this one.
choose_directory()

STEP_BYTES: Final = 4
"""Bytes of a row per step of `tile`."""

BFLOAT16: Final = np.uint16(0)
FLOAT32: Final = np.float32(0)
ADDRESS: Final = np.int64(0)
INT8: Final = np.int8(0)
"""Weights of a bfloat16 product: int8."""
INT4: Final = np.uint8(0)
"""Weights of a bfloat16 product: int4, see `multiply`."""
BFLOAT12: Final = np.int16(0)
"""Weights of a bfloat16 product: bfloat16 in 12 bits, see `bfloat12`."""

INTERNAL: Final[Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
"""Options of functions that neither Python nor `llvm.call` calls: they compile faster."""

inlined: Any = njit(forceinline=True, boundscheck=False, **INTERNAL)
"""Decorator of functions that are always inlined."""

_IS_WIDE: Final = are_vectors_wide()
_LOG2_E: Final = 1.4426950408889634
# The exponent of the smallest normal number.
_LOWEST: Final = -126.0
# Polynomials of 2 ** f for f in [0, 1], highest power first; exact at 0. Minimax fits with relative
# errors of at most 9e-5 (rounding to bfloat16: 2e-3) and 2e-9.
_SHORT_SERIES: Final = (0.07706706865913662, 0.22764496183962538, 0.6951167931865881, 1.0)
_LONG_SERIES: Final = (
    2.161291914548068e-4,
    1.2467845340325193e-3,
    9.675451674202822e-3,
    5.548528057202427e-2,
    2.4022930556094527e-1,
    6.93147044442802e-1,
    1.0,
)


def marker(dtype: torch.dtype) -> Any:
    """The marker of rows of this dtype."""
    return {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}[dtype]


def weights_marker(dtype: torch.dtype) -> Any:
    """The marker of weights of this dtype: bfloat16 is stored in 12 bits if the processor has the
    tables for it."""
    return BFLOAT12 if dtype == torch.bfloat16 and _IS_WIDE else marker(dtype)


def tensor_address(tensor: Tensor | None, dtype: torch.dtype | None = None) -> int:
    """The address of a tensor's numbers; 0: no tensor. Kernels take them as contiguous, and of
    `dtype` if one is given: another layout would be misread."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), f"{tuple(tensor.shape)} has strides {tensor.stride()}"
    assert dtype is None or tensor.dtype == dtype, f"{tensor.dtype} instead of {dtype}"
    return tensor.data_ptr()


def aligned(size: int, dtype: torch.dtype) -> Tensor:
    """An empty, 64-byte aligned tensor of `size` numbers."""
    memory = torch.empty(size + VECTOR_BYTES // dtype.itemsize, dtype=dtype)
    start = -memory.data_ptr() % VECTOR_BYTES // dtype.itemsize
    return memory[start : start + size]


@inlined
def widen(shorts: Any) -> Any:
    """Convert 16 bfloat16, the upper halves of float32, to float32."""
    return llvm.reinterpreted(FLOATS, llvm.converted(INTS, shorts) << 16)


@inlined
def load_numbers(kind: Any, address: int, count: int) -> Any:
    """Load the first `count` of 16 numbers as float32; the others are 0."""
    if llvm.itemsize(kind) == 2:
        whole = count == LANES
        return widen(
            llvm.load(SHORTS, address) if whole else llvm.load_first(SHORTS, address, count)
        )
    return llvm.load(FLOATS, address) if count == LANES else llvm.load_first(FLOATS, address, count)


@inlined
def store_numbers(kind: Any, value: Any, address: int, count: int) -> Any:
    """Store the first `count` of 16 float32 as numbers of a kind; returns the rounded values."""
    if llvm.itemsize(kind) == 2:
        numbers = round_to_bfloat16(value)
        if count == LANES:
            llvm.store(numbers, address)
        else:
            llvm.store_first(numbers, address, count)
        return widen(numbers)
    if count == LANES:
        llvm.store(value, address)
    else:
        llvm.store_first(value, address, count)
    return value


@inlined
def exponential(kind: Any, value: Any) -> Any:
    """e ** value for values <= 0, as precise as the kind; exactly 1 for 0."""
    value = value * _LOG2_E
    if _IS_WIDE:
        return scaled(_power(kind, above_floor(value)), value)
    value = llvm.chosen(value > _LOWEST, value, _LOWEST)
    whole = floor(value)
    exponent = (llvm.converted(INTS, whole) + 127) << 23
    return _power(kind, value - whole) * llvm.reinterpreted(FLOATS, exponent)


@inlined
def _power(kind: Any, part: Any) -> Any:
    """2 ** part for parts from 0 to 1."""
    if llvm.itemsize(kind) == 2:
        return polynomial(part, _SHORT_SERIES)
    return polynomial(part, _LONG_SERIES)


class _BFloat(ir.Type):
    """LLVM's bfloat type, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


@llvm.instruction(lambda total, left, right: total)
def fma(builder: Any, kinds: Any, total: Any, left: Any, right: Any) -> Any:
    """total + left * right, rounded once; right may be a number."""
    return _fma(builder, kinds.return_type, total, left, right)


def _fma(builder: Any, kind: llvm.Vector, total: Any, left: Any, right: Any) -> Any:
    name = f"llvm.fma.{llvm.suffix(kind)}"
    return llvm.call_llvm(builder, name, kind.code, left, llvm.fill(builder, kind, right), total)


@llvm.instruction(lambda vector, factors: vector)
def polynomial(builder: Any, kinds: Any, vector: Any, factors: Any) -> Any:
    """A polynomial of a vector, highest power first, by `fma`."""
    kind, count = kinds.return_type, kinds.args[1].count
    first, *others = cgutils.unpack_tuple(builder, factors, count)
    total = llvm.fill(builder, kind, first)
    for factor in others:
        total = _fma(builder, kind, llvm.fill(builder, kind, factor), total, vector)
    return total


def _define_unary(name: str, llvm_name: str) -> Any:
    """An intrinsic for a unary LLVM function on vectors."""

    def write(builder: Any, kinds: Any, vector: Any) -> Any:
        kind = kinds.return_type
        return llvm.call_llvm(builder, f"llvm.{llvm_name}.{llvm.suffix(kind)}", kind.code, vector)

    write.__name__ = name
    return llvm.instruction(lambda vector: vector)(write)


floor, nearest = _define_unary("floor", "floor"), _define_unary("nearest", "rint")
swap_bytes = _define_unary("swap_bytes", "bswap")


@llvm.instruction(lambda vector: vector.number)
def first_lane(builder: Any, kinds: Any, vector: Any) -> Any:
    """The number in the first lane."""
    return builder.extract_element(vector, INT32(0))


def _halved(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Reduce a vector by combining halves: the same order on every processor."""
    count = vector.type.count
    while count > 1:
        count //= 2
        code = ir.VectorType(INT32, count)
        left, right = (
            builder.shuffle_vector(vector, vector, ir.Constant(code, list(range(at, at + count))))
            for at in (0, count)
        )
        vector = combine(left, right)
    return builder.extract_element(vector, INT32(0))


@llvm.instruction(lambda vector: vector.number)
def sum_of_lanes(builder: Any, kinds: Any, vector: Any) -> Any:
    """The sum of all lanes, by halves."""
    return _halved(builder, vector, builder.fadd)


@llvm.instruction(lambda vector: vector.number)
def largest_of_lanes(builder: Any, kinds: Any, vector: Any) -> Any:
    """The largest lane, by halves; of two unordered numbers, the second."""

    def larger(left: Any, right: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", left, right), left, right)

    return _halved(builder, vector, larger)


@llvm.instruction(lambda vector: vector.number)
def largest_number(builder: Any, kinds: Any, vector: Any) -> Any:
    """The largest lane that is not NaN."""
    kind = kinds.args[0]
    return llvm.call_llvm(
        builder, f"llvm.vector.reduce.fmax.{llvm.suffix(kind)}", llvm.FLOAT, vector
    )


@llvm.instruction(types.boolean)
def is_any(builder: Any, kinds: Any, mask: Any) -> Any:
    """Whether any lane of a mask is set."""
    bits = ir.IntType(kinds.args[0].lanes)
    return builder.icmp_unsigned("!=", builder.bitcast(mask, bits), bits(0))


def _avx512(builder: Any, name: str, left: Any, right: Any) -> Any:
    every_lane, as_usual = ir.Constant(ir.IntType(LANES), -1), INT32(4)
    arguments = left, right, FLOATS.all(0.0), every_lane, as_usual
    return llvm.call_llvm(builder, f"llvm.x86.avx512.mask.{name}.ps.512", FLOATS.code, *arguments)


@llvm.instruction(FLOATS)
def above_floor(builder: Any, kinds: Any, vector: Any) -> Any:
    """vector - floor(vector); AVX-512, without exceptions."""
    return _avx512(builder, "reduce", vector, INT32(0b1001))


@llvm.instruction(FLOATS)
def scaled(builder: Any, kinds: Any, vector: Any, exponents: Any) -> Any:
    """vector * 2 ** floor(exponents); AVX-512."""
    return _avx512(builder, "scalef", vector, exponents)


@llvm.instruction(llvm.WORDS)
def look_up(builder: Any, kinds: Any, table: Any, indices: Any) -> Any:
    """Look up words in a table of 32 by the lowest 5 bits of each index; AVX-512."""
    return llvm.call_llvm(
        builder, "llvm.x86.avx512.permvar.hi.512", llvm.WORDS.code, table, indices
    )


@llvm.instruction(llvm.BYTES)
def look_up_bytes(builder: Any, kinds: Any, lower: Any, indices: Any, upper: Any) -> Any:
    """Look up bytes in a table of two vectors by the lowest 7 bits of each index; AVX512_VBMI."""
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    return llvm.call_llvm(builder, name, llvm.BYTES.code, lower, indices, upper)


@llvm.instruction(INTS)
def pairs_of_bytes(builder: Any, kinds: Any, lower: Any, upper: Any, half: Any) -> Any:
    """Interleave lower and upper bytes of the first or last 8 of every 16 words; `half`: a
    literal."""
    first = 8 * kinds.args[2].literal_value
    order = [
        side * VECTOR_BYTES + quarter + number
        for quarter in range(0, VECTOR_BYTES, 16)
        for number in range(first, first + 8)
        for side in (0, 1)
    ]
    order_code = ir.Constant(ir.VectorType(INT32, VECTOR_BYTES), order)
    return builder.bitcast(builder.shuffle_vector(lower, upper, order_code), INTS.code)


@llvm.instruction(SHORTS)
def round_to_bfloat16(builder: Any, kinds: Any, vector: Any) -> Any:
    """Round 16 float32 to bfloat16 bits (to nearest, ties to even); NaN is not supported."""
    if has_bfloat16_products():
        code = ir.VectorType(_BFloat(), LANES)
        rounded = llvm.call_llvm(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", code, vector)
        return builder.bitcast(rounded, SHORTS.code)
    bits = llvm.rounded_bits(builder, builder.bitcast(vector, INTS.code), INTS.all)
    return builder.trunc(bits, SHORTS.code)


def _add_pairs(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add the products of pairs of bfloat16 to the total, lane by lane."""
    if has_bfloat16_products():
        code = ir.VectorType(_BFloat(), 2 * LANES)
        pairs = builder.bitcast(left, code), builder.bitcast(right, code)
        return llvm.call_llvm(
            builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS.code, total, *pairs
        )
    # A bfloat16 is the upper half of a float32.
    for half, constant in ((builder.shl, 16), (builder.and_, -(2**16))):
        numbers = (half(pair, INTS.all(constant)) for pair in (left, right))
        total = _add_floats(builder, total, *numbers)
    return total


def _add_floats(builder: Any, total: Any, left: Any, right: Any) -> Any:
    left, right = builder.bitcast(left, FLOATS.code), builder.bitcast(right, FLOATS.code)
    return _fma(builder, FLOATS, total, left, right)


def _sums(rows: Any, columns: Any, *_: Any) -> Any:
    """The type of the sums of a tile: vectors of 16 float32, which stay in registers, row by row.
    rows and columns: literals."""
    return types.UniTuple(FLOATS, rows.literal_value * columns.literal_value)


@llvm.instruction(_sums)
def no_sums(builder: Any, kinds: Any, rows: Any, columns: Any) -> Any:
    """Zero sums."""
    return ir.Constant(ir.ArrayType(FLOATS.code, kinds.return_type.count), None)


def _grid(builder: Any, columns: Any, count: int, address: Any, stride: Any) -> list[Any]:
    """Pointers to `count` vectors of sums, in rows of `stride` bytes and of a literal number of
    columns."""
    found = []
    for index in range(count):
        row, column = divmod(index, columns.literal_value)
        start = builder.add(address, builder.mul(stride, INT64(row)))
        at = builder.add(start, INT64(column * VECTOR_BYTES))
        found.append(llvm.pointer_to(builder, at, FLOATS.code))
    return found


@llvm.instruction(_sums)
def load_sums(builder: Any, kinds: Any, rows: Any, columns: Any, address: Any, stride: Any) -> Any:
    """Load sums in rows of `stride` bytes."""
    pointers = _grid(builder, kinds.args[1], kinds.return_type.count, address, stride)
    return _joined(builder, [builder.load(pointer, align=4) for pointer in pointers])


@llvm.instruction(types.void)
def store_sums(
    builder: Any, kinds: Any, sums: Any, columns: Any, address: Any, stride: Any
) -> None:
    """Store sums of a literal number of columns in rows of `stride` bytes."""
    pointers = _grid(builder, kinds.args[1], kinds.args[0].count, address, stride)
    for index, pointer in enumerate(pointers):
        builder.store(builder.extract_value(sums, index), pointer, align=4)


def _joined(builder: Any, vectors: list[Any]) -> Any:
    value = ir.Constant(ir.ArrayType(FLOATS.code, len(vectors)), ir.Undefined)
    for index, vector in enumerate(vectors):
        value = builder.insert_value(value, vector, index)
    return value


@intrinsic
def add_steps(
    typingctx: Any,
    kind: Any,
    sums: Any,
    unpack: Any,
    columns: Any,
    others: Any,
    inputs: Any,
    stride: Any,
) -> Any:
    """Add the products of the next steps to the sums. columns: address of each column's vectors;
    `unpack`(kind, address, *others) returns a tuple of INTS, one per step. inputs: address of the
    first row; rows are `stride` bytes apart. For each step and row, 4 bytes are multiplied with
    every lane: two bfloat16, or one float32 for that kind."""
    one = unpack.get_call_type(typingctx, (kind, types.int64, *others), {})
    multiply = _add_floats if kind == types.float32 else _add_pairs

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        apply = context.get_function(unpack, one)
        more = cgutils.unpack_tuple(builder, values[4], len(others))
        vectors = [
            cgutils.unpack_tuple(builder, apply(builder, [values[0], start, *more]))
            for start in cgutils.unpack_tuple(builder, values[3], columns.count)
        ]
        totals = cgutils.unpack_tuple(builder, values[1], sums.count)
        rows = [
            builder.add(values[5], builder.mul(values[6], INT64(row)))
            for row in range(sums.count // columns.count)
        ]
        for step in range(one.return_type.count):
            for row, start in enumerate(rows):
                at = llvm.pointer_to(builder, builder.add(start, INT64(4 * step)), INT32)
                value = llvm.fill(builder, INTS, builder.load(at, align=4))
                for index, column in enumerate(vectors, row * columns.count):
                    totals[index] = multiply(builder, totals[index], column[step], value)
        return _joined(builder, totals)

    return sums(kind, sums, unpack, columns, others, types.int64, types.int64), generate


@llvm.instruction(lambda totals, factor, sums: totals)
def add_scaled(builder: Any, kinds: Any, totals: Any, factor: Any, sums: Any) -> Any:
    """totals + factor * sums, each rounded once."""
    lefts, rights = (
        cgutils.unpack_tuple(builder, both, kinds.return_type.count) for both in (totals, sums)
    )
    pairs = zip(lefts, rights, strict=True)
    found = [_fma(builder, FLOATS, total, own, factor) for total, own in pairs]
    return _joined(builder, found)


@intrinsic(prefer_literal=True)
def spaced(typingctx: Any, count: Any, start: Any, distance: Any) -> Any:
    """A tuple of `count` (a literal) addresses from `start`."""
    result = types.UniTuple(types.int64, count.literal_value)

    def generate(context: Any, builder: Any, kinds: Any, values: Any) -> Any:
        offsets = (builder.mul(values[2], INT64(index)) for index in range(result.count))
        addresses = [builder.add(values[1], offset) for offset in offsets]
        return context.make_tuple(builder, result, addresses)

    return result(count, types.int64, types.int64), generate
