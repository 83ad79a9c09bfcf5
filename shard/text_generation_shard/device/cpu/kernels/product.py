"""The arguments of a product with packed weights, and the epilogue of a tile: sums are scaled,
gated, rounded and stored, in vectors.
"""

from typing import Any, Final, NamedTuple

from numba import njit, types

from text_generation_shard.device.cpu.kernels import (
    Address,
    Count,
    Flag,
    are_vectors_wide,
    struct_type,
)
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
from text_generation_shard.device.cpu.kernels.vector import (
    FLOAT32,
    exponential,
    inlined,
    store_numbers,
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
# Sign bit of a float32.
_SIGN: Final = -(2**31)


class Product(NamedTuple):
    """out [num_rows, num_outputs] = inputs [num_rows, steps] times packed weights."""

    weights: Address
    # INT8: scales, float32 [num_outputs]; BFLOAT12: see `bfloat12.Narrowed`; INT4: input sums of
    # groups, see `grouped_linear`; others: 0.
    beside: Address
    inputs: Address
    out: Address
    num_rows: Count
    # Steps of STEP_BYTES of a row.
    steps: Count
    num_outputs: Count
    # Whether the weight is gated, see GatedWeight.
    is_gated: Flag
    # Number of equal parts of a sum, which are added pairwise; and whether `out` is float32 for any
    # kind of rows: see `part_products`.
    num_parts: Count = 1
    is_partial: Flag = False


PRODUCT: Final = struct_type(Product)


@inlined
def clear(sums: int, rows: int, columns: int) -> None:
    """Set the sums of a tile to 0."""
    for row in range(rows):
        numbers = array_at(FLOAT32, sums + row * SUMS_BYTES)
        for lane in range(columns * LANES):
            numbers[lane] = FLOAT32


@njit(inline="always")
def store_rows(
    weight_kind: Any,
    kind: Any,
    product: Product,
    panel: int,
    columns: int,
    sums: int,
    row: int,
    count: int,
) -> None:
    """Store the sums of a tile, `count` rows from `row` and `columns` panels, as outputs."""
    halves, start = 2 if product.is_gated else 1, panel * LANES
    scales = product.beside + halves * panel * VECTOR_BYTES
    left = product.num_outputs - start
    part = scratch(TILE_COLUMNS)
    for index in range(count):
        to = product.out + ((row + index) * product.num_outputs + start) * itemsize(kind)
        target = to if left >= columns * LANES else part
        _store_row(weight_kind, kind, columns, halves, sums, scales, target)
        sums += SUMS_BYTES
        if left < columns * LANES:
            source, numbers = array_at(kind, part), array_at(kind, to)
            for lane in range(left):
                numbers[lane] = source[lane]


@inlined
def _store_row(
    weight_kind: Any, kind: Any, columns: int, halves: int, sums: int, scales: int, target: int
) -> None:
    """Store the sums of one row as outputs. With two halves, each vector of sums of gates is
    followed by one of ups; scales likewise."""
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
    """gate / (1 + e ** -gate), computed with a non-positive exponent."""
    small = exponential(kind, reinterpreted(FLOATS, reinterpreted(INTS, gate) | _SIGN))
    return chosen(gate >= 0.0, gate, gate * small) / (small + 1.0)
