"""`tile` for weights of 4 bits, with a scale and a zero for each group of 32 inputs."""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from text_generation_shard.kernels.llvm import (
    FLOAT,
    FLOATS,
    INT8,
    INT16,
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
from text_generation_shard.kernels.tile import Form, accumulate, add_pairs, grid_addresses

GROUP: Final = 32
"""Inputs that share a scale and a zero."""


def _load_nibbles(builder: Any, address: Any) -> Any:
    """32 numbers from -8 to 7, of half a byte each, as pairs of bfloat16 by a table."""
    numbers = load(builder, address, ir.VectorType(INT8, LANES), LANES)
    low = builder.zext(numbers, INTS)
    places = builder.or_(low, builder.shl(low, constant(12)))
    # Of each 16 bits the lowest 5 count: a number, and one bit that may be anything.
    values = [float(number) for number in range(-8, 8)] * 2
    bits = (np.array(values, np.float32).view(np.uint32) >> 16).tolist()
    places = builder.and_(builder.bitcast(places, SHORTS), ir.Constant(SHORTS, [31] * 2 * LANES))
    name = "llvm.x86.avx512.permvar.hi.512"
    looked_up = call(builder, name, SHORTS, ir.Constant(SHORTS, bits), places)
    return builder.bitcast(looked_up, INTS)


_NIBBLES: Final = Form(VECTOR_BYTES // 4, _load_nibbles, add_pairs)


@intrinsic(prefer_literal=True)
def grouped_tile(
    typingctx: Any,
    rows: Any,
    columns: Any,
    vectors: Any,
    scales: Any,
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

    scales: a tuple of addresses; for each group 16 scales and 16 zeros in bfloat16. input_sums:
    the sums of the inputs of each group, float32.
    """
    literal = types.IntegerLiteral
    if not (isinstance(rows, literal) and isinstance(columns, literal)):
        return None
    size = rows.literal_value, columns.literal_value
    starts_type = types.UniTuple(types.int64, size[1])
    signature = types.void(rows, columns, starts_type, starts_type, *(types.int64,) * 7)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        starts = cgutils.unpack_tuple(builder, arguments[2], size[1])
        scales = cgutils.unpack_tuple(builder, arguments[3], size[1])
        inputs, input_stride, input_sums, input_sums_stride, groups = arguments[4:9]
        before = builder.block
        body, end = (builder.append_basic_block(name) for name in ("group", "groups_end"))
        builder.branch(body)
        builder.position_at_end(body)
        group = builder.phi(INT64)
        group.add_incoming(INT64(0), before)
        totals = [builder.phi(FLOATS) for _ in range(size[0] * size[1])]
        for phi in totals:
            phi.add_incoming(ZEROS, before)
        steps = INT64(GROUP // 2)
        offset = builder.mul(group, INT64(GROUP // 2 * _NIBBLES.step_bytes))
        first = builder.add(inputs, builder.mul(group, INT64(GROUP * 2)))
        zeros = [ZEROS] * len(totals)
        products = accumulate(
            builder,
            size,
            [builder.add(start, offset) for start in starts],
            first,
            input_stride,
            steps,
            zeros,
            _NIBBLES,
        )
        offset = builder.mul(group, INT64(VECTOR_BYTES))
        factors = [_load_halves(builder, builder.add(start, offset)) for start in scales]
        offset = builder.mul(group, INT64(4))
        next_totals = []
        for row in range(size[0]):
            start = builder.add(input_sums, builder.mul(input_sums_stride, INT64(row)))
            value = broadcast(builder, load(builder, builder.add(start, offset), FLOAT, 4))
            for column, (scale, zero) in enumerate(factors):
                place = row * size[1] + column
                total = add_product(builder, totals[place], scale, products[place])
                next_totals.append(add_product(builder, total, zero, value))
        next_group = builder.add(group, INT64(1))
        group.add_incoming(next_group, builder.block)
        for phi, value in zip(totals, next_totals, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", next_group, groups), body, end)
        builder.position_at_end(end)
        addresses = grid_addresses(builder, arguments[9], arguments[10], size)
        for total, address in zip(next_totals, addresses, strict=True):
            builder.store(total, address, align=4)
        return context.get_dummy_value()

    return signature, generate


def _load_halves(builder: Any, address: Any) -> tuple[Any, Any]:
    """Two times 16 bfloat16 as float32."""
    halves = []
    for place in (0, 1):
        start = builder.add(address, INT64(place * VECTOR_BYTES // 2))
        numbers = load(builder, start, ir.VectorType(INT16, LANES), LANES)
        wide = builder.shl(builder.zext(numbers, INTS), constant(16))
        halves.append(builder.bitcast(wide, FLOATS))
    return halves[0], halves[1]
