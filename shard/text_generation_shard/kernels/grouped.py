"""`tile` for weights of 4 bits, with a scale and a zero for each group of 32 inputs.

16 outputs of a group are a block: four vectors of numbers, four in each 16 bits, then one of
scales and zeros. A number becomes a bfloat16 by a table of 16, which takes one shift and one
permutation for 32 of them; all that is needed of a block lies side by side.
"""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from text_generation_shard.kernels.llvm import (
    FLOAT,
    FLOATS,
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
from text_generation_shard.kernels.tile import add_pairs, grid_addresses
from text_generation_shard.kernels.vector import STEP_BYTES

GROUP: Final = 32
"""Inputs that share a scale and a zero."""
STEPS: Final = GROUP // 2
"""Pairs of inputs of a group."""
PLACES: Final = 4
"""Numbers in 16 bits: those of as many steps, the first of them lowest."""
VECTORS: Final = STEPS // PLACES + 1
"""Of a block."""
BLOCK_BYTES: Final = VECTORS * VECTOR_BYTES

_BITS: Final = 4
# Of each 16 bits the lowest 5 count: a number, and one bit of its neighbour that may be anything.
_NUMBERS: Final = np.tile(np.arange(-8, 8, dtype=np.float32), 2).view(np.uint32) >> 16
_TABLE: Final = ir.Constant(SHORTS, _NUMBERS.tolist())


@intrinsic(prefer_literal=True)
def grouped_tile(
    typingctx: Any,
    rows: Any,
    columns: Any,
    blocks: Any,
    inputs: Any,
    input_stride: Any,
    input_sums: Any,
    input_sums_stride: Any,
    groups: Any,
    sums: Any,
    sums_stride: Any,
) -> Any:
    """`tile` for numbers of 4 bits, where each output has a scale and a zero for each group of 32
    inputs: w = scale * number + zero.

    blocks: a tuple of `columns` addresses, each of `groups` blocks. input_sums: the sums of the
    inputs of each group, float32. Only the products of one group are kept in registers.
    """
    literal = types.IntegerLiteral
    if not (isinstance(rows, literal) and isinstance(columns, literal)):
        return None
    size = rows.literal_value, columns.literal_value
    starts_type = types.UniTuple(types.int64, size[1])
    signature = types.void(rows, columns, starts_type, *(types.int64,) * 7)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        inputs, input_stride, input_sums, input_sums_stride, groups = arguments[3:8]
        addresses = grid_addresses(builder, arguments[8], arguments[9], size)
        for address in addresses:
            builder.store(ZEROS, address, align=4)
        before = builder.block
        body, end = (builder.append_basic_block(name) for name in ("group", "groups_end"))
        builder.branch(body)
        builder.position_at_end(body)
        group = builder.phi(INT64)
        group.add_incoming(INT64(0), before)
        offset = builder.mul(group, INT64(BLOCK_BYTES))
        starts = [
            builder.add(start, offset)
            for start in cgutils.unpack_tuple(builder, arguments[2], size[1])
        ]
        offset = builder.mul(group, INT64(STEPS * STEP_BYTES))
        products = _multiply(builder, starts, _rows(builder, inputs, input_stride, offset, size[0]))
        offset = builder.mul(group, INT64(4))
        at_sums = _rows(builder, input_sums, input_sums_stride, offset, size[0])
        _add(builder, starts, at_sums, products, addresses)
        next_group = builder.add(group, INT64(1))
        group.add_incoming(next_group, builder.block)
        builder.cbranch(builder.icmp_signed("<", next_group, groups), body, end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return signature, generate


def _rows(builder: Any, base: Any, stride: Any, offset: Any, count: int) -> list[Any]:
    """The addresses at an offset in rows of `stride` bytes."""
    first = builder.add(base, offset)
    return [builder.add(first, builder.mul(stride, INT64(row))) for row in range(count)]


def _multiply(builder: Any, blocks: list[Any], inputs: list[Any]) -> list[Any]:
    """The products of a group, row by row: 16 sums for each block, without scale and zero."""
    products = [ZEROS] * (len(inputs) * len(blocks))
    for vector in range(VECTORS - 1):
        offset = INT64(vector * VECTOR_BYTES)
        words = [load(builder, builder.add(at, offset), SHORTS, VECTOR_BYTES) for at in blocks]
        for place in range(PLACES):
            columns = [_look_up(builder, word, place) for word in words]
            offset = INT64((vector * PLACES + place) * STEP_BYTES)
            for row, start in enumerate(inputs):
                value = load(builder, builder.add(start, offset), INT32, 4)
                value = broadcast(builder, value)
                for at, column in enumerate(columns, row * len(blocks)):
                    products[at] = add_pairs(builder, products[at], column, value)
    return products


def _look_up(builder: Any, words: Any, place: int) -> Any:
    """The numbers at one of the places of each 16 bits, as pairs of bfloat16."""
    if place:
        words = builder.lshr(words, ir.Constant(SHORTS, [_BITS * place] * 2 * LANES))
    looked_up = call(builder, "llvm.x86.avx512.permvar.hi.512", SHORTS, _TABLE, words)
    return builder.bitcast(looked_up, INTS)


def _add(
    builder: Any, blocks: list[Any], input_sums: list[Any], products: list[Any], totals: list[Any]
) -> None:
    """What lies at `totals` grows by the products of a group, with scale and zero."""
    offset = INT64((VECTORS - 1) * VECTOR_BYTES)
    factors = []
    for start in blocks:
        # A bfloat16 is the upper half of a float32.
        pairs = load(builder, builder.add(start, offset), INTS, VECTOR_BYTES)
        scale = builder.shl(pairs, constant(16))
        zero = builder.and_(pairs, constant(-(2**16)))
        factors.append((builder.bitcast(scale, FLOATS), builder.bitcast(zero, FLOATS)))
    for row, address in enumerate(input_sums):
        value = broadcast(builder, load(builder, address, FLOAT, 4))
        for at, (scale, zero) in enumerate(factors, row * len(blocks)):
            total = builder.load(totals[at], align=4)
            total = add_product(builder, total, scale, products[at])
            builder.store(add_product(builder, total, zero, value), totals[at], align=4)
