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
    llvm,
    struct_type,
    vector,
)
from text_generation_shard.device.cpu.kernels.llvm import FLOATS, INTS, LANES, VECTOR_BYTES
from text_generation_shard.device.cpu.kernels.vector import FLOAT32

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
_SIGN: Final = -(2**31)


class Product(NamedTuple):
    """out [num_rows, num_outputs] = inputs [num_rows, steps] times packed weights."""

    weights: Address
    # INT8: scales, float32 [num_outputs]; BFLOAT12: see `bfloat12.Narrowed`; INT4: input sums of
    # groups, see `grouped`; others: 0.
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
    small = vector.exponential(
        kind, llvm.reinterpreted(FLOATS, llvm.reinterpreted(INTS, gate) | _SIGN)
    )
    return llvm.chosen(gate >= 0.0, gate, gate * small) / (small + 1.0)
