"""What a product with packed weights is given, and what becomes of the sums of a tile: scaled, sent
through a gate, rounded and stored.

A vector at a time: the same number by number took a tenth of the time of a product of many rows.
"""

from typing import Any, Final, NamedTuple

from numba import njit, types

from text_generation_shard.device.cpu.kernels import are_vectors_wide
from text_generation_shard.device.cpu.kernels.llvm import (
    FLOATS,
    INTS,
    LANES,
    VECTOR_BYTES,
    array_at,
    chosen,
    constant_of_type,
    itemsize,
    load,
    reinterpreted,
    scratch,
)
from text_generation_shard.device.cpu.kernels.structs import Address, Count, Flag, struct_type
from text_generation_shard.device.cpu.kernels.vector import (
    FLOAT32,
    exponential,
    inlined,
    store_numbers,
)

# A tile keeps its sums in registers: 8 x 3 of the 32 of AVX-512; what is narrower needs two and has
# fewer.
TILE_ROWS: Final = 8 if are_vectors_wide() else 4
TILE_COLUMNS: Final = 3 if are_vectors_wide() else 1
# Rows whose inputs stay in the second-level cache while the weights pass by; whole tiles.
ROWS_AT_ONCE: Final = 240
# Vectors of sums of a row: for gates, and what they let through, of a tile.
SUMS_WIDTH: Final = 2 * TILE_COLUMNS
SUMS_BYTES: Final = SUMS_WIDTH * VECTOR_BYTES
# Of a float32.
_SIGN: Final = -(2**31)


class Product(NamedTuple):
    """out [num_rows, num_outputs] = inputs [num_rows, steps] times packed weights."""

    weights: Address
    # What is beside the weights: of INT8 scales, float32 [num_outputs]; of BFLOAT12 see
    # `bfloat12.Narrowed`; of INT4 the sums of groups of inputs, see `grouped_linear`; of others 0.
    beside: Address
    inputs: Address
    out: Address
    num_rows: Count
    # Of STEP_BYTES of a row.
    steps: Count
    num_outputs: Count
    # Whether weights are gates above what they let through, see GatedWeight.
    is_gated: Flag
    # In how many parts, of as many inputs each, a sum is taken, which are then added pairwise; and
    # whether `out` is float32, whatever the kind of the rows: see `part_products`.
    num_parts: Count = 1
    is_partial: Flag = False


PRODUCT: Final = struct_type(Product)


@inlined
def clear(sums: int, rows: int, columns: int) -> None:
    """Sums of a tile begin with 0."""
    for row in range(rows):
        numbers = array_at(FLOAT32, sums + row * SUMS_BYTES)
        for lane in range(columns * LANES):
            numbers[lane] = FLOAT32


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


@inlined
def _put_row(
    weight_kind: Any, kind: Any, columns: int, halves: int, sums: int, scales: int, target: int
) -> None:
    """Vectors of sums become outputs; for each vector of them, if there are two halves, sums of
    gates and behind them those of what they let through, and likewise scales."""
    for column in range(columns):
        offset = halves * column * VECTOR_BYTES
        value = _scaled(weight_kind, sums + offset, scales + offset)
        if halves == 2:
            offset += VECTOR_BYTES
            value = _silu(kind, value) * _scaled(weight_kind, sums + offset, scales + offset)
        store_numbers(kind, value, target + column * LANES * itemsize(kind), LANES)


@inlined
def _scaled(weight_kind: Any, sums: int, scales: int) -> Any:
    value = load(FLOATS, sums)
    return value * load(FLOATS, scales) if has_scales(weight_kind) else value


has_scales = constant_of_type(lambda kind: kind in (types.int8, types.int16))


@inlined
def _silu(kind: Any, gate: Any) -> Any:
    """gate / (1 + e ** -gate), by an exponent that is never above 0."""
    small = exponential(kind, reinterpreted(FLOATS, reinterpreted(INTS, gate) | _SIGN))
    return chosen(gate >= 0.0, gate, gate * small) / (small + 1.0)
