"""Products with int4 weights: a scale and a zero for each group of 32 inputs.

A block has two groups of 16 outputs: a vector of zeros, a vector of scales, and for each group four
vectors of numbers, four numbers per 16 bits. A table of 16 converts numbers to bfloat16, with one
shift and one permutation for 32 numbers. A block is contiguous.

The contribution of the zeros is also a product of pairs: with the input sums of two groups. These
sums are rounded to bfloat16, like the inputs.
"""

from typing import Any, Final

import numpy as np
from numba import njit, prange

from text_generation_shard.device.cpu.kernels import llvm, vector
from text_generation_shard.device.cpu.kernels.bfloat12 import load_step
from text_generation_shard.device.cpu.kernels.llvm import FLOATS, INTS, LANES, VECTOR_BYTES, WORDS
from text_generation_shard.device.cpu.kernels.product import (
    SUMS_BYTES,
    TILE_ROWS,
    Outputs,
    Product,
)
from text_generation_shard.device.cpu.kernels.tile import by_size, sized
from text_generation_shard.device.cpu.kernels.vector import BFLOAT16, STEP_BYTES

GROUP: Final = 32
"""Inputs that share a scale and a zero."""
STEPS: Final = GROUP // 2
"""Pairs of inputs per group."""
NUMBERS_PER_WORD: Final = 4
"""Numbers per 16 bits: one of each of four steps, the first step in the lowest bits."""
VECTORS: Final = STEPS // NUMBERS_PER_WORD
"""Vectors of numbers per group."""
BLOCK_BYTES: Final = 2 * (1 + VECTORS) * VECTOR_BYTES

# Offsets and sizes within a block.
_SCALES_AT: Final = VECTOR_BYTES
_NUMBERS_AT: Final = 2 * VECTOR_BYTES
_SCALE_BYTES: Final = LANES * 2
_NUMBER_BYTES: Final = VECTORS * VECTOR_BYTES
_BITS: Final = 4

# A lookup uses 5 bits: a number, and an arbitrary bit of the next number. So the table holds each
# number twice.
_NUMBERS: Final = np.tile(np.arange(-8, 8, dtype=np.float32), 2).view(np.uint32) >> 16
_TABLE: Final = llvm.Table(WORDS, _NUMBERS.tolist())

# From this number of rows, all threads compute the input sums.
_SHARED_ROWS: Final = 8
# Rows of the largest tile; the others have 8, 4, 2 or 1.
_MANY_ROWS: Final = 12
# For few rows: most panels of an item, and bytes of weights that suffice for an item.
_MOST_PANELS: Final = 4
_ITEM_BYTES: Final = 20 * 1024


@vector.inlined
def _sum_group(inputs: int) -> Any:
    """The sum of the 32 bfloat16 at an address, in a fixed order."""
    pairs = llvm.load(INTS, inputs)
    # A bfloat16 is the upper half of a float32.
    lower, upper = (
        llvm.reinterpreted(FLOATS, pairs << 16),
        llvm.reinterpreted(FLOATS, pairs & -(2**16)),
    )
    return vector.sum_of_lanes(lower + upper)


def _tile(rows: int) -> Any:
    """`tile` of one column for int4 blocks: w = scale * number + zero. source: address and stride
    of the inputs, then of their group sums.

    The products of a group and the totals are both in registers, so a tile has only one column.
    With 12 rows, the conversion to bfloat16 is hidden behind the products.
    """

    def multiply_blocks(blocks: int, source: Any, groups: int, sums: int) -> None:
        inputs, stride, input_sums, input_sums_stride = source
        totals = vector.no_sums(rows, 1)
        for group in range(groups):
            pair, member = group >> 1, group & 1
            block = blocks + pair * BLOCK_BYTES
            if member == 0:
                # The first of two groups adds the zeros of both.
                at = input_sums + pair * STEP_BYTES
                zeros = (block,)
                totals = vector.add_steps(
                    BFLOAT16, totals, load_step, zeros, (), at, input_sums_stride
                )
            start = (block + _NUMBERS_AT + member * _NUMBER_BYTES,)
            at = inputs + group * STEPS * STEP_BYTES
            products = vector.no_sums(rows, 1)
            for step in range(STEPS):
                word, shift = step // NUMBERS_PER_WORD, step % NUMBERS_PER_WORD * _BITS
                own = at + step * STEP_BYTES
                products = vector.add_steps(
                    BFLOAT16, products, _look_up, start, (word, shift), own, stride
                )
            scales = vector.widen(
                llvm.load(llvm.SHORTS, block + _SCALES_AT + member * _SCALE_BYTES)
            )
            totals = vector.add_scaled(totals, scales, products)
        vector.store_sums(totals, 1, sums, SUMS_BYTES)

    return sized(multiply_blocks, rows, 1)


@vector.inlined
def _look_up(kind: Any, numbers: int, word: int, shift: int) -> Any:
    """The numbers of one step as pairs of bfloat16."""
    words = llvm.load(WORDS, numbers + word * VECTOR_BYTES)
    return (llvm.reinterpreted(INTS, vector.look_up(_TABLE, words >> shift)),)


_by_rows: Final = by_size({rows: _tile(rows) for rows in (_MANY_ROWS, 8, 4, 2, 1)})


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def sum_groups(inputs: int, input_sums: int, row: int, groups: int) -> None:
    """Write the input sums of a row's groups as pairs of bfloat16, for `sum_part`."""
    width = groups + groups % 2
    sums = llvm.array_at(BFLOAT16, input_sums + row * width * 2)
    sums[width - 1] = BFLOAT16
    for group in range(groups):
        total = _sum_group(inputs + (row * groups + group) * STEPS * STEP_BYTES)
        sums[group] = llvm.rounded(BFLOAT16, total)


@njit(parallel=True, nogil=True, cache=True, boundscheck=False, error_model="numpy")
def sum_inputs(product: Product) -> None:
    """`sum_groups` for all rows of a product."""
    groups = product.steps // STEPS
    if product.num_rows < _SHARED_ROWS:
        for row in range(product.num_rows):
            sum_groups(product.inputs, product.beside, row, groups)
    else:
        for row in prange(product.num_rows):
            sum_groups(product.inputs, product.beside, row, groups)


def sum_part(weight_kind: Any, own: Outputs, part: int, row: int, rows: int) -> None:
    """See `multiply`; there is one column."""
    product = own.product
    groups, row_bytes = product.steps // STEPS, product.steps * STEP_BYTES
    part_groups, halves = groups // product.num_parts, 2 if product.is_gated else 1
    source = (
        product.inputs + row * row_bytes + part * part_groups * STEPS * STEP_BYTES,
        row_bytes,
        product.beside + row * sums_bytes(groups) + part * sums_bytes(part_groups),
        sums_bytes(groups),
    )
    for half in range(halves):
        blocks = product.weights + (halves * own.panel + half) * panel_bytes(groups)
        blocks += part * panel_bytes(part_groups)
        _by_rows(rows, (blocks, source, part_groups, own.sums + half * VECTOR_BYTES))


@vector.inlined
def tiles_of_item(tile_bytes: int, num_rows: int) -> Any:
    # Taking an item has a cost, so small panels are combined.
    return max(1, min(_MOST_PANELS, _ITEM_BYTES // tile_bytes)) if num_rows <= TILE_ROWS else 1


@vector.inlined
def tile_rows(num_rows: int) -> int:
    # Larger tiles are faster, but the last one may compute some rows twice.
    are_many = num_rows >= _MANY_ROWS and (
        -num_rows % _MANY_ROWS <= -num_rows % TILE_ROWS + num_rows // 16
    )
    rows = min(num_rows, TILE_ROWS)
    while rows & (rows - 1):
        rows &= rows - 1
    return _MANY_ROWS if are_many else rows


@vector.inlined
def sums_bytes(groups: int) -> int:
    """Bytes of the input sums of a row."""
    return -(-groups // 2) * STEP_BYTES


@vector.inlined
def panel_bytes(groups: int) -> int:
    """Bytes of a panel with this number of groups."""
    return groups // 2 * BLOCK_BYTES + groups % 2 * (BLOCK_BYTES - VECTORS * VECTOR_BYTES)
