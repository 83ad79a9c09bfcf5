"""Products with int4 weights: `linear` with a scale and a zero for each group of 32 inputs.

A block has two groups of 16 outputs: a vector of zeros, a vector of scales, and for each group four
vectors of numbers, four numbers per 16 bits. A table of 16 converts numbers to bfloat16, with one
shift and one permutation for 32 numbers. A block is contiguous.

The contribution of the zeros is also a product of pairs: with the input sums of two groups. These
sums are rounded to bfloat16, like the inputs.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numba import njit, prange, types
from numba.extending import overload
from torch import Tensor

from text_generation_shard.device.cpu.kernels import vector_code
from text_generation_shard.device.cpu.kernels.bfloat12 import load_step
from text_generation_shard.device.cpu.kernels.linear import (
    PackedWeight,
    interleaved,
    item_bytes,
    num_items,
)
from text_generation_shard.device.cpu.kernels.llvm import (
    FLOATS,
    INTS,
    LANES,
    SHORTS,
    VECTOR_BYTES,
    WORDS,
    Table,
    array_at,
    call,
    load,
    outlined,
    reinterpreted,
    rounded,
    scratch,
)
from text_generation_shard.device.cpu.kernels.product import (
    LEVELS_VECTORS,
    ROWS_AT_ONCE,
    SUMS_BYTES,
    SUMS_WIDTH,
    TILE_ROWS,
    Product,
    add_part,
    num_parts,
    store_rows,
)
from text_generation_shard.device.cpu.kernels.thread_pool import may_store
from text_generation_shard.device.cpu.kernels.tile import sized
from text_generation_shard.device.cpu.kernels.vector import (
    BFLOAT16,
    INT4,
    STEP_BYTES,
    aligned,
    inlined,
    tensor_address,
    widen,
)

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
_TABLE: Final = Table(WORDS, _NUMBERS.tolist())

# From this number of rows, all threads compute the input sums.
_SHARED_ROWS: Final = 8
# Rows of the largest tile; the others have 8, 4, 2 or 1.
_MANY_ROWS: Final = 12
# For few rows: most panels of an item, and bytes of weights that suffice for an item.
_MOST_PANELS: Final = 4
_ITEM_BYTES: Final = 20 * 1024
_SUMS_VECTORS: Final = max(_MANY_ROWS, _MOST_PANELS * TILE_ROWS) * SUMS_WIDTH


class GroupedWeight(PackedWeight):
    """An int4 weight [N, K]: w = scale * number + zero, by group."""

    kind = "int4"

    def __init__(
        self,
        numbers: Tensor,
        scale: Tensor,
        zero: Tensor,
        is_gated: bool = False,
        part: int | None = None,
    ) -> None:
        """numbers [N, K] from 0 to 15, int8, which represent -8 to 7; scale and zero [N, K / 32]
        bfloat16; N is a multiple of 16, K of 32.

        `is_gated`, part: see PackedWeight; a gated weight has twice the outputs of the product."""
        outputs, inputs = numbers.shape
        self._num_outputs, self._num_inputs = outputs // 2 if is_gated else outputs, inputs
        self._is_gated, self.padding = is_gated, 0
        self.weight_kind, self._dtype = INT4, torch.bfloat16
        # Groups are processed in pairs.
        self.num_parts = num_parts(inputs, part, 2 * GROUP)
        panels, groups = outputs // LANES, inputs // GROUP
        if is_gated:
            numbers, scale, zero = (interleaved(rows) for rows in (numbers, scale, zero))
        # An odd number of groups is padded with zeros; the numbers of the padding are not stored.
        pairs, extra = -(-groups // 2), -groups % 2
        packed = aligned(panels * panel_bytes.py_func(groups), torch.uint8)
        rows = torch.zeros(panels, pairs * BLOCK_BYTES // 2, dtype=torch.int16)
        blocks = rows.view(panels, pairs, 2 * (1 + VECTORS), 2 * LANES)
        zeros, scales = (
            torch.nn.functional.pad(part, (0, extra))
            .view(torch.int16)
            .view(panels, LANES, pairs, 2)
            for part in (zero, scale)
        )
        blocks[:, :, 0] = zeros.transpose(1, 2).flatten(2)
        blocks[:, :, 1] = scales.permute(0, 2, 3, 1).flatten(2)
        members = numbers.view(panels, LANES, groups, VECTORS, NUMBERS_PER_WORD, 2)
        shifts = 4 * torch.arange(NUMBERS_PER_WORD, dtype=torch.int32)[:, None]
        words = (members.int() << shifts).sum(dim=-2).permute(0, 2, 3, 1, 4).flatten(3)
        words = torch.nn.functional.pad(words, (0, 0, 0, 0, 0, extra))
        blocks[:, :, 2:] = words.view(panels, pairs, 2 * VECTORS, 2 * LANES)
        words = packed.view(torch.int16).view(panels, -1)
        words.copy_(rows[:, : words.shape[1]])
        self._keep(packed, None, multiply_grouped_item)

    def _multiply(self, product: Product) -> None:
        groups = self._num_inputs // GROUP
        sums = torch.empty(product.num_rows * sums_bytes.py_func(groups), dtype=torch.uint8)
        multiply_grouped(self._code, product._replace(beside=tensor_address(sums)))


@inlined
def _sum_group(inputs: int) -> Any:
    """The sum of the 32 bfloat16 at an address, in a fixed order."""
    pairs = load(INTS, inputs)
    # A bfloat16 is the upper half of a float32.
    lower, upper = reinterpreted(FLOATS, pairs << 16), reinterpreted(FLOATS, pairs & -(2**16))
    return vector_code.sum_of_lanes(lower + upper)


def _tile(rows: int) -> Any:
    """`tile` of one column for int4 blocks: w = scale * number + zero. source: address and stride
    of the inputs, then of their group sums.

    The products of a group and the totals are both in registers, so a tile has only one column.
    With 12 rows, the conversion to bfloat16 is hidden behind the products.
    """

    def multiply_blocks(blocks: int, source: Any, groups: int, sums: int) -> None:
        inputs, stride, input_sums, input_sums_stride = source
        totals = vector_code.no_sums(rows, 1)
        for group in range(groups):
            pair, member = group >> 1, group & 1
            block = blocks + pair * BLOCK_BYTES
            if member == 0:
                # The first of two groups adds the zeros of both.
                at = input_sums + pair * STEP_BYTES
                zeros = (block,)
                totals = vector_code.add_steps(
                    BFLOAT16, totals, load_step, zeros, (), at, input_sums_stride
                )
            start = (block + _NUMBERS_AT + member * _NUMBER_BYTES,)
            at = inputs + group * STEPS * STEP_BYTES
            products = vector_code.no_sums(rows, 1)
            for step in range(STEPS):
                word, shift = step // NUMBERS_PER_WORD, step % NUMBERS_PER_WORD * _BITS
                own = at + step * STEP_BYTES
                products = vector_code.add_steps(
                    BFLOAT16, products, _look_up, start, (word, shift), own, stride
                )
            scales = widen(load(SHORTS, block + _SCALES_AT + member * _SCALE_BYTES))
            totals = vector_code.add_scaled(totals, scales, products)
        vector_code.store_sums(totals, sums, SUMS_BYTES)

    return sized(multiply_blocks, rows, 1)


@inlined
def _look_up(kind: Any, numbers: int, vector: int, shift: int) -> Any:
    """The numbers of one step as pairs of bfloat16."""
    words = load(WORDS, numbers + vector * VECTOR_BYTES)
    return (reinterpreted(INTS, vector_code.look_up(_TABLE, words >> shift)),)


_TILE_1, _TILE_2, _TILE_4, _TILE_8, _TILE_12 = _tile(1), _tile(2), _tile(4), _tile(8), _tile(12)


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def sum_groups(inputs: int, input_sums: int, row: int, groups: int) -> None:
    """Write the input sums of a row's groups as pairs of bfloat16, for `multiply_grouped_item`."""
    width = groups + groups % 2
    sums = array_at(BFLOAT16, input_sums + row * width * 2)
    sums[width - 1] = BFLOAT16
    for group in range(groups):
        total = _sum_group(inputs + (row * groups + group) * STEPS * STEP_BYTES)
        sums[group] = rounded(BFLOAT16, total)


@njit(parallel=True, nogil=True, cache=True, boundscheck=False, error_model="numpy")
def multiply_grouped(code: int, product: Product) -> None:
    """`multiply` for int4 weights and bfloat16 rows; also writes the input sums. code: address of
    `multiply_grouped_item`."""
    groups = product.steps // STEPS
    if product.num_rows < _SHARED_ROWS:
        for row in range(product.num_rows):
            sum_groups(product.inputs, product.beside, row, groups)
    else:
        for row in prange(product.num_rows):
            sum_groups(product.inputs, product.beside, row, groups)
    for first in range(0, product.num_rows, ROWS_AT_ONCE):
        for item in prange(_num_items(product)):
            where = np.int64(first), np.int64(item), np.int64(0)
            call(code, (INT4, BFLOAT16, product, *where))


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def multiply_grouped_item(
    weight_kind: Any, kind: Any, product: Product, first: int, item: int, ticket: int
) -> None:
    """`multiply_item` for some panels of INT4."""
    num_rows, row_bytes = product.num_rows, product.steps * STEP_BYTES
    groups, tile_rows = product.steps // STEPS, rows_of_tile(num_rows)
    part_groups, halves = groups // product.num_parts, 2 if product.is_gated else 1
    sums, levels = scratch(_SUMS_VECTORS), scratch(LEVELS_VECTORS)
    span = panels_of_item(product)
    panels = range(item * span, min((item + 1) * span, product.num_outputs // LANES))
    for panel in panels:
        for wanted in range(first, min(num_rows, first + ROWS_AT_ONCE), tile_rows):
            row = min(wanted, num_rows - tile_rows)
            # For few rows, all sums are complete before the first result is stored.
            at = sums
            if ticket:
                at += ((panel - panels.start) * TILE_ROWS + row) * SUMS_BYTES
            for part in range(product.num_parts):
                source = (
                    product.inputs + row * row_bytes + part * part_groups * STEPS * STEP_BYTES,
                    row_bytes,
                    product.beside + row * sums_bytes(groups) + part * sums_bytes(part_groups),
                    sums_bytes(groups),
                )
                for half in range(halves):
                    blocks = product.weights + (halves * panel + half) * panel_bytes(groups)
                    blocks += part * panel_bytes(part_groups)
                    to = at + half * VECTOR_BYTES
                    multiply_grouped_tile(tile_rows, blocks, source, part_groups, to)
                if product.num_parts > 1:
                    add_part(BFLOAT16, product, part, panel, 1, tile_rows, at, levels)
            if not ticket:
                store_rows(BFLOAT16, BFLOAT16, product, panel, 1, at, row, tile_rows)
    if ticket and may_store(ticket):
        for panel in panels:
            at = sums + (panel - panels.start) * TILE_ROWS * SUMS_BYTES
            store_rows(BFLOAT16, BFLOAT16, product, panel, 1, at, 0, num_rows)


@inlined
def _num_items(product: Product) -> Any:
    return -(-(product.num_outputs // LANES) // panels_of_item(product))


@inlined
def panels_of_item(product: Product) -> Any:
    # Taking an item has a cost, so small panels are combined.
    size = (2 if product.is_gated else 1) * panel_bytes(product.steps // STEPS)
    return max(1, min(_MOST_PANELS, _ITEM_BYTES // size)) if product.num_rows <= TILE_ROWS else 1


@inlined
def rows_of_tile(num_rows: int) -> int:
    # Larger tiles are faster, but the last one may compute some rows twice.
    are_many = num_rows >= _MANY_ROWS and (
        -num_rows % _MANY_ROWS <= -num_rows % TILE_ROWS + num_rows // 16
    )
    rows = min(num_rows, TILE_ROWS)
    while rows & (rows - 1):
        rows &= rows - 1
    return _MANY_ROWS if are_many else rows


@inlined
def sums_bytes(groups: int) -> int:
    """Bytes of the input sums of a row."""
    return -(-groups // 2) * STEP_BYTES


@inlined
def panel_bytes(groups: int) -> int:
    """Bytes of a panel with this number of groups."""
    return groups // 2 * BLOCK_BYTES + groups % 2 * (BLOCK_BYTES - VECTORS * VECTOR_BYTES)


@njit(inline="always")
def multiply_grouped_tile(rows: int, blocks: int, source: Any, groups: int, sums: int) -> None:
    if rows == 12:
        outlined(_TILE_12, (blocks, source, groups, sums))
    elif rows == 8:
        outlined(_TILE_8, (blocks, source, groups, sums))
    elif rows == 4:
        outlined(_TILE_4, (blocks, source, groups, sums))
    elif rows == 2:
        outlined(_TILE_2, (blocks, source, groups, sums))
    else:
        outlined(_TILE_1, (blocks, source, groups, sums))


# A declaration: compiled code calls the function that `overload` returns.
def cost_of_items(weight_kind: Any, product: Product) -> tuple[int, int]:
    """Number of items of a product of at most ROWS_AT_ONCE rows, and bytes of weights per item;
    items' weights are contiguous. For compiled code."""
    raise NotImplementedError


@overload(cost_of_items)
def _choose_cost(weight_kind: Any, product: Any) -> Callable[..., tuple[int, int]]:
    def of_grouped(weight_kind: Any, product: Any) -> tuple[int, int]:
        size = panels_of_item(product) * panel_bytes(product.steps // STEPS)
        return _num_items(product), (2 if product.is_gated else 1) * size

    def of_others(weight_kind: Any, product: Any) -> tuple[int, int]:
        items = num_items(weight_kind, product.num_rows, product.num_outputs)
        return items, item_bytes(weight_kind, product)

    return of_grouped if weight_kind == types.uint8 else of_others
