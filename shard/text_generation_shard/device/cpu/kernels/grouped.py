"""`tile` for weights of 4 bits, with a scale and a zero for each group of 32 inputs.

16 outputs of two groups are a block: a vector of zeros, one of scales, and of each group four
vectors of numbers, four in each 16 bits. A number becomes a bfloat16 by a table of 16, which takes
one shift and one permutation for 32 of them; all that is needed of a block lies side by side.

What the zeros contribute is a product of pairs as well, with the sums of two groups of inputs.
These are rounded to bfloat16 like the inputs themselves: that matters as little as it does there.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from text_generation_shard.device.cpu.kernels.llvm import (
    FLOATS,
    INT16,
    INT32,
    INT64,
    INTS,
    LANES,
    SHORTS,
    VECTOR_BYTES,
    ZEROS,
    add_product,
    broadcast,
    call,
    constant,
    load,
)
from text_generation_shard.device.cpu.kernels.tile import add_pairs, call_outlined, grid_addresses
from text_generation_shard.device.cpu.kernels.vector import STEP_BYTES

GROUP: Final = 32
"""Inputs that share a scale and a zero."""
STEPS: Final = GROUP // 2
"""Pairs of inputs of a group."""
PLACES: Final = 4
"""Numbers in 16 bits: those of as many steps, the first of them lowest."""
VECTORS: Final = STEPS // PLACES
"""Of the numbers of a group."""
BLOCK_BYTES: Final = 2 * (1 + VECTORS) * VECTOR_BYTES

# In a block, and of a group in it.
_SCALES_AT: Final = VECTOR_BYTES
_NUMBERS_AT: Final = 2 * VECTOR_BYTES
_SCALE_BYTES: Final = LANES * 2
_NUMBER_BYTES: Final = VECTORS * VECTOR_BYTES
_BITS: Final = 4
# Of each 16 bits the lowest 5 count: a number, and one bit of its neighbour that may be anything.
_NUMBERS: Final = np.tile(np.arange(-8, 8, dtype=np.float32), 2).view(np.uint32) >> 16
_TABLE: Final = ir.Constant(SHORTS, _NUMBERS.tolist())


@intrinsic
def sum_group(typingctx: Any, inputs: Any) -> Any:
    """The sum of the 32 bfloat16 at an address, always in the same order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pairs = load(builder, arguments[0], INTS, 2)
        total = builder.fadd(*_halves(builder, pairs))
        for distance in (8, 4, 2, 1):
            order = ir.Constant(INTS, [(lane + distance) % LANES for lane in range(LANES)])
            total = builder.fadd(total, builder.shuffle_vector(total, total, order))
        return builder.extract_element(total, INT32(0))

    return types.float32(types.int64), generate


@intrinsic(prefer_literal=True)
def grouped_tile(
    typingctx: Any,
    rows: Any,
    blocks: Any,
    inputs: Any,
    groups: Any,
    sums: Any,
    sums_stride: Any,
) -> Any:
    """`tile` of one column for blocks of 4 bits: w = scale * number + zero.

    blocks: the address of the column's. inputs: address and stride of the inputs, then of the sums
    of their groups, which are bfloat16 as well. Products of a group and sums are both kept in
    registers, and so of many rows only one column is computed at a time: with 12 rows, making
    bfloat16 of the numbers takes no longer than the products beside it.
    """
    if not isinstance(rows, types.IntegerLiteral):
        return None
    size = rows.literal_value
    where = types.int64, types.UniTuple(types.int64, 4)
    signature = types.void(rows, *where, *(types.int64,) * 3)

    def generate_tile(builder: Any, *arguments: Any) -> None:
        groups, sums, sums_stride = arguments[5:]
        before = builder.block
        body, end = (builder.append_basic_block(name) for name in ("group", "groups_end"))
        builder.branch(body)
        builder.position_at_end(body)
        group = builder.phi(INT64)
        group.add_incoming(INT64(0), before)
        totals = [builder.phi(FLOATS) for _ in range(size)]
        for phi in totals:
            phi.add_incoming(ZEROS, before)
        places = _places(builder, group, size, *arguments[:5])
        with_zeros = _add_zeros(builder, group, places, totals)
        next_totals = _add_scaled(builder, places, _multiply(builder, places), with_zeros)
        next_group = builder.add(group, INT64(1))
        group.add_incoming(next_group, builder.block)
        for phi, value in zip(totals, next_totals, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", next_group, groups), body, end)
        builder.position_at_end(end)
        addresses = grid_addresses(builder, sums, sums_stride, (size, 1))
        for total, address in zip(next_totals, addresses, strict=True):
            builder.store(total, address, align=4)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        inputs = cgutils.unpack_tuple(builder, arguments[2], 4)
        name = f"grouped_tile_{size}"
        call_outlined(builder, name, generate_tile, arguments[1], *inputs, *arguments[3:])
        return context.get_dummy_value()

    return signature, generate


class _Places(NamedTuple):
    """Where all that belongs to a group lies: zeros (of two groups), scales and numbers; of each
    row inputs, and sums (of two groups)."""

    zeros: Any
    scales: Any
    numbers: Any
    inputs: list[Any]
    input_sums: list[Any]


def _places(
    builder: Any,
    group: Any,
    rows: int,
    blocks: Any,
    inputs: Any,
    input_stride: Any,
    input_sums: Any,
    input_sums_stride: Any,
) -> _Places:
    pair, member = builder.lshr(group, INT64(1)), builder.and_(group, INT64(1))

    def at(base: Any, index: Any, size: int, offset: int = 0) -> Any:
        base = builder.add(base, builder.mul(index, INT64(size)))
        return builder.add(base, INT64(offset))

    def strided(base: Any, stride: Any) -> list[Any]:
        return [builder.add(base, builder.mul(stride, INT64(row))) for row in range(rows)]

    block = at(blocks, pair, BLOCK_BYTES)
    return _Places(
        block,
        at(block, member, _SCALE_BYTES, _SCALES_AT),
        at(block, member, _NUMBER_BYTES, _NUMBERS_AT),
        strided(at(inputs, group, STEPS * STEP_BYTES), input_stride),
        strided(at(input_sums, pair, STEP_BYTES), input_sums_stride),
    )


def _add_zeros(builder: Any, group: Any, places: _Places, totals: list[Any]) -> list[Any]:
    """Totals and, with the first of two groups, what the zeros of both contribute."""
    before = builder.block
    is_first = builder.icmp_signed("==", builder.and_(group, INT64(1)), INT64(0))
    added = []
    with builder.if_then(is_first):
        zeros = load(builder, places.zeros, INTS, VECTOR_BYTES)
        for total, address in zip(totals, places.input_sums, strict=True):
            value = broadcast(builder, load(builder, address, INT32, 4))
            added.append(add_pairs(builder, total, zeros, value))
        adding = builder.block
    both = []
    for total, value in zip(totals, added, strict=True):
        phi = builder.phi(FLOATS)
        phi.add_incoming(total, before)
        phi.add_incoming(value, adding)
        both.append(phi)
    return both


def _add_scaled(builder: Any, places: _Places, products: list[Any], totals: list[Any]) -> list[Any]:
    """Totals and the products of a group."""
    numbers = load(builder, places.scales, ir.VectorType(INT16, LANES), _SCALE_BYTES)
    # A bfloat16 is the upper half of a float32.
    scales = builder.bitcast(builder.shl(builder.zext(numbers, INTS), constant(16)), FLOATS)
    return [
        add_product(builder, total, scales, product)
        for total, product in zip(totals, products, strict=True)
    ]


def _multiply(builder: Any, places: _Places) -> list[Any]:
    """The products of a group, row by row, without scales."""
    products = [ZEROS] * len(places.inputs)
    for vector in range(VECTORS):
        at = builder.add(places.numbers, INT64(vector * VECTOR_BYTES))
        words = load(builder, at, SHORTS, VECTOR_BYTES)
        for place in range(PLACES):
            column = _look_up(builder, words, place)
            offset = INT64((vector * PLACES + place) * STEP_BYTES)
            for row, start in enumerate(places.inputs):
                value = load(builder, builder.add(start, offset), INT32, 4)
                value = broadcast(builder, value)
                products[row] = add_pairs(builder, products[row], column, value)
    return products


def _halves(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """Pairs of bfloat16, which are the upper halves of float32, as two vectors of these."""
    lower, upper = builder.shl(pairs, constant(16)), builder.and_(pairs, constant(-(2**16)))
    return builder.bitcast(lower, FLOATS), builder.bitcast(upper, FLOATS)


def _look_up(builder: Any, words: Any, place: int) -> Any:
    """The numbers at one of the places of each 16 bits, as pairs of bfloat16."""
    if place:
        words = builder.lshr(words, ir.Constant(SHORTS, [_BITS * place] * 2 * LANES))
    looked_up = call(builder, "llvm.x86.avx512.permvar.hi.512", SHORTS, _TABLE, words)
    return builder.bitcast(looked_up, INTS)
