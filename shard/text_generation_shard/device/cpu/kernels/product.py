"""What a product with packed weights is given, and what becomes of the sums of a tile: scaled, sent
through a gate, rounded and stored.

A vector at a time, in the processor's own terms: the same written number by number took a tenth of
the time of a product of many rows.
"""

from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from text_generation_shard.device.cpu.kernels import are_vectors_wide
from text_generation_shard.device.cpu.kernels.calls import Address, Count, Flag, struct_type
from text_generation_shard.device.cpu.kernels.llvm import (
    FLOATS,
    INT64,
    LANES,
    VECTOR_BYTES,
    call,
    load,
    round_vector,
)
from text_generation_shard.device.cpu.kernels.softmax import exponential_vector
from text_generation_shard.device.cpu.kernels.vector import FLOAT32, array_at, itemsize, scratch

# A tile keeps its sums in registers: 8 x 3 of the 32 of AVX-512; what is narrower needs two and has
# fewer.
TILE_ROWS: Final = 8 if are_vectors_wide() else 4
TILE_COLUMNS: Final = 3 if are_vectors_wide() else 1
# Rows whose inputs stay in the second-level cache while the weights pass by; whole tiles.
ROWS_AT_ONCE: Final = 240
# Vectors of sums of a row: for gates, and what they let through, of a tile.
SUMS_WIDTH: Final = 2 * TILE_COLUMNS
SUMS_BYTES: Final = SUMS_WIDTH * VECTOR_BYTES


class Product(NamedTuple):
    """out [num_rows, num_outputs] = inputs [num_rows, steps] times packed weights."""

    weights: Address
    # What is beside the weights: of INT8 scales, float32 [num_outputs]; of BFLOAT12 see `narrow`;
    # of INT4 the sums of groups of inputs, see `grouped_linear`; of others 0.
    beside: Address
    inputs: Address
    out: Address
    num_rows: Count
    # Of STEP_BYTES of a row.
    steps: Count
    num_outputs: Count
    # Whether weights are gates above what they let through, see GatedWeight.
    is_gated: Flag


PRODUCT: Final = struct_type(Product)

_ONES = ir.Constant(FLOATS, [1.0] * LANES)


@intrinsic(prefer_literal=True)
def put(
    typingctx: Any,
    weight_kind: Any,
    kind: Any,
    columns: Any,
    sums: Any,
    scales: Any,
    target: Any,
) -> Any:
    """`columns` (a literal) vectors of 16 sums at an address become outputs at another: rounded if
    kind is the marker of bfloat16; before, multiplied by as many scales, float32, if weight_kind is
    that of INT8 or BFLOAT12."""
    if not isinstance(columns, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, scales, target = arguments[3:]
        for column in range(columns.literal_value):
            value = _scaled(builder, weight_kind, sums, scales, column)
            _store(builder, kind, value, target, column)
        return context.get_dummy_value()

    return types.void(weight_kind, kind, columns, *(types.int64,) * 3), generate


@intrinsic(prefer_literal=True)
def put_gated(
    typingctx: Any,
    weight_kind: Any,
    kind: Any,
    columns: Any,
    sums: Any,
    scales: Any,
    target: Any,
) -> Any:
    """`put` of silu(gate) * up: for each vector of outputs, 16 sums of gates and behind them those
    of what they let through; likewise the scales."""
    if not isinstance(columns, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, scales, target = arguments[3:]
        for column in range(columns.literal_value):
            gate, up = (
                _scaled(builder, weight_kind, sums, scales, 2 * column + half) for half in range(2)
            )
            _store(builder, kind, builder.fmul(_silu(builder, kind, gate), up), target, column)
        return context.get_dummy_value()

    return types.void(weight_kind, kind, columns, *(types.int64,) * 3), generate


def _scaled(builder: Any, weight_kind: Any, sums: Any, scales: Any, vector: int) -> Any:
    offset = INT64(vector * VECTOR_BYTES)
    value = load(builder, builder.add(sums, offset), FLOATS, 4)
    if weight_kind in (types.int8, types.int16):
        value = builder.fmul(value, load(builder, builder.add(scales, offset), FLOATS, 4))
    return value


def _silu(builder: Any, kind: Any, gate: Any) -> Any:
    """gate / (1 + e ** -gate), by an exponent that is never above 0."""
    size = call(builder, f"llvm.fabs.v{LANES}f32", FLOATS, gate)
    small = exponential_vector(builder, kind, builder.fneg(size))
    is_positive = builder.fcmp_ordered(">=", gate, ir.Constant(FLOATS, [0.0] * LANES))
    part = builder.select(is_positive, gate, builder.fmul(gate, small))
    return builder.fdiv(part, builder.fadd(_ONES, small))


def _store(builder: Any, kind: Any, value: Any, target: Any, vector: int) -> None:
    number = round_vector(builder, value) if kind == types.uint16 else value
    size = 2 if kind == types.uint16 else 4
    address = builder.add(target, INT64(vector * LANES * size))
    builder.store(number, builder.inttoptr(address, number.type.as_pointer()), align=size)


@njit(inline="always")
def clear(sums: int, rows: int, columns: int) -> None:
    """Sums of a tile begin with 0."""
    for row in range(rows):
        numbers = array_at(FLOAT32, sums + row * SUMS_BYTES)
        for place in range(columns * LANES):
            numbers[place] = FLOAT32


@njit(inline="always")
def put_rows(
    weight_kind: Any,
    kind: Any,
    product: Product,
    panel: int,
    columns: int,
    sums: int,
    row: int,
    count: int,
) -> None:
    """The sums of a tile of `count` rows from `row` on, and of `columns` panels, become outputs."""
    halves, start = 2 if product.is_gated else 1, panel * LANES
    scales = product.beside + halves * panel * VECTOR_BYTES
    left = product.num_outputs - start
    part = scratch(TILE_COLUMNS)
    for index in range(count):
        to = product.out + ((row + index) * product.num_outputs + start) * itemsize(kind)
        target = to if left >= columns * LANES else part
        _put_row(weight_kind, kind, columns, halves, sums, scales, target)
        sums += SUMS_BYTES
        if left < columns * LANES:
            source, numbers = array_at(kind, part), array_at(kind, to)
            for lane in range(left):
                numbers[lane] = source[lane]


@njit(inline="always")
def _put_row(
    weight_kind: Any, kind: Any, columns: int, halves: int, sums: int, scales: int, target: int
) -> None:
    if columns == 3:
        if halves == 1:
            put(weight_kind, kind, 3, sums, scales, target)
        else:
            put_gated(weight_kind, kind, 3, sums, scales, target)
    elif halves == 1:
        put(weight_kind, kind, 1, sums, scales, target)
    else:
        put_gated(weight_kind, kind, 1, sums, scales, target)
