"""Products whose sums are computed in parts, optionally as float32 partial sums for an exchange
between ranks.

The inputs are split into parts of equal size. Each part is summed in the order of its inputs; then
a binary tree adds neighbouring parts. A rank with some of the parts computes a branch of the tree.
So the sum over all ranks has the same bits for any number of ranks, if the number of parts is the
same power of two.

With 12-bit weights, each part has its own `beside`; otherwise it would depend on which parts a rank
has.
"""

from typing import Any, Final

import torch
from numba import njit, types
from torch import Tensor

from text_generation_shard.device.cpu.kernels.bfloat12 import STEPS as NARROW_STEPS
from text_generation_shard.device.cpu.kernels.bfloat12 import add_exceptions
from text_generation_shard.device.cpu.kernels.grouped_linear import (
    GROUP,
    STEPS,
    GroupedWeight,
    multiply_grouped_tile,
    panel_bytes,
    panels_of_item,
    rows_of_tile,
    sums_bytes,
)
from text_generation_shard.device.cpu.kernels.linear import (
    DEQUANTIZED_STEPS,
    DEQUANTIZED_VECTORS,
    MANY_ROWS,
    PackedWeight,
    add_dequantized,
    are_narrow,
    multiply_tile,
    num_panels,
    tile_columns,
    tile_rows,
    weights_marker,
)
from text_generation_shard.device.cpu.kernels.llvm import (
    FLOATS,
    LANES,
    VECTOR_BYTES,
    constant_of_type,
    itemsize,
    load,
    scratch,
    store,
)
from text_generation_shard.device.cpu.kernels.product import (
    ROWS_AT_ONCE,
    SUMS_BYTES,
    SUMS_WIDTH,
    TILE_ROWS,
    Product,
    clear,
    has_scales,
)
from text_generation_shard.device.cpu.kernels.thread_pool import may_store
from text_generation_shard.device.cpu.kernels.tile import bytes_per_step, dequantize
from text_generation_shard.device.cpu.kernels.vector import (
    BFLOAT12,
    BFLOAT16,
    FLOAT32,
    INT4,
    INT8,
    STEP_BYTES,
    inlined,
    numbers_per_step,
    store_numbers,
)

MOST_PARTS: Final = 8
"""Most parts of a sum; a power of two."""
# Levels of the tree for MOST_PARTS.
_LEVELS: Final = 4
# Rows of the largest tile, because the last tile may begin before the wanted rows.
_MARGIN: Final = 16
_SUMS_VECTORS: Final = (_MARGIN + ROWS_AT_ONCE) * SUMS_WIDTH
_LEVEL_VECTORS: Final = ROWS_AT_ONCE * SUMS_WIDTH
_LEVEL_BYTES: Final = _LEVEL_VECTORS * VECTOR_BYTES
_ALL_LEVELS: Final = _LEVELS * _LEVEL_VECTORS


def num_parts(num_inputs: int, part: int, kind: Any) -> int:
    """Number of parts of a rank's inputs, with `part` inputs each, doubled until weights of this
    kind can be split so; 1 if the parts are no branch of a tree."""
    while part % unit_of(kind):
        part *= 2
    count = num_inputs // part
    is_branch = num_inputs % part == 0 and count in (1, 2, 4, MOST_PARTS)
    return count if is_branch else 1


def unit_of(kind: Any) -> int:
    """A part's number of inputs must be a multiple of this, for weights of this kind (a marker of
    `vector`)."""
    if type(kind) is type(INT4):
        return 2 * GROUP
    if type(kind) is type(INT8):
        return 4
    if type(kind) is type(BFLOAT12):
        return NARROW_STEPS * numbers_per_step(torch.bfloat16)
    return STEP_BYTES // int(kind.itemsize)


class PartedWeight(PackedWeight):
    """`PackedWeight` with sums in parts, see `num_parts`."""

    def __init__(self, weight: Tensor, part: int, scales: Tensor | None = None) -> None:
        """part: inputs per part. The rest is as in PackedWeight."""
        kind = INT8 if scales is not None else weights_marker(weight.dtype)
        self._num_parts = num_parts(weight.shape[1], part, kind)
        super().__init__(weight, scales)

    @staticmethod
    def _item() -> Any:
        return multiply_parts_item


class PartedGroupedWeight(GroupedWeight):
    """`GroupedWeight` with sums in parts, see `num_parts`."""

    def __init__(self, numbers: Tensor, part: int, scale: Tensor, zero: Tensor) -> None:
        """part: inputs per part. The rest is as in GroupedWeight."""
        self._num_parts = num_parts(numbers.shape[1], part, INT4)
        super().__init__(numbers, scale, zero)

    @staticmethod
    def _item() -> Any:
        return multiply_grouped_parts_item


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def multiply_parts_item(
    weight_kind: Any, kind: Any, product: Product, first: int, item: int, ticket: int
) -> None:
    """`multiply_item` with sums in parts; not for gated weights."""
    columns = tile_columns(weight_kind, product.num_rows, product.num_outputs)
    panel = min(item * columns, num_panels(product.num_outputs) - columns)
    last = min(product.num_rows, first + ROWS_AT_ONCE)
    sums, levels = scratch(_SUMS_VECTORS) + _MARGIN * SUMS_BYTES, scratch(_ALL_LEVELS)
    for part in range(product.num_parts):
        if _are_bytes(weight_kind) and product.num_rows >= MANY_ROWS:
            _sum_dequantized(weight_kind, kind, product, part, panel, columns, first, last, sums)
        else:
            _sum_part(weight_kind, product, part, panel, columns, first, last, sums)
        scales, distance = product.beside + panel * VECTOR_BYTES, VECTOR_BYTES
        if are_narrow(weight_kind):
            scales = product.beside + (panel * product.num_parts + part) * VECTOR_BYTES
            distance = product.num_parts * VECTOR_BYTES
        for row in range(last - first):
            for column in range(columns):
                at = row * SUMS_BYTES + column * VECTOR_BYTES
                value = load(FLOATS, sums + at)
                if has_scales(weight_kind):
                    value = value * load(FLOATS, scales + column * distance)
                _add_part(part, value, levels + at)
    if ticket == 0 or may_store(ticket):
        _store_outputs(kind, product, panel * LANES, columns, first, last, _whole(product, levels))


@njit(inline="always")
def _sum_part(
    weight_kind: Any,
    product: Product,
    part: int,
    panel: int,
    columns: int,
    first: int,
    last: int,
    sums: int,
) -> None:
    """Compute one part's sums of all rows, tile by tile."""
    steps, step_bytes = product.steps // product.num_parts, bytes_per_step(weight_kind)
    row_bytes, panel_bytes = product.steps * STEP_BYTES, product.steps * step_bytes
    weights = product.weights + panel * panel_bytes + part * steps * step_bytes
    inputs = product.inputs + part * steps * STEP_BYTES
    wanted = first
    while wanted < last:
        rows = tile_rows(weight_kind, columns, product.num_rows, last - wanted)
        row = min(wanted, product.num_rows - rows)
        source, at = inputs + row * row_bytes, sums + (row - first) * SUMS_BYTES
        multiply_tile(
            weight_kind, rows, columns, weights, panel_bytes, source, row_bytes, steps, at
        )
        if are_narrow(weight_kind):
            all_parts = num_panels(product.num_outputs) * product.num_parts
            for column in range(columns):
                own = (panel + column) * product.num_parts + part, 1, all_parts
                to = at + column * VECTOR_BYTES, SUMS_BYTES
                add_exceptions(product.beside, own, source, row_bytes, rows, to)
        wanted = row + rows


@njit(inline="always")
def _sum_dequantized(
    weight_kind: Any,
    kind: Any,
    product: Product,
    part: int,
    panel: int,
    columns: int,
    first: int,
    last: int,
    sums: int,
) -> None:
    """`_sum_part` for many rows: weights are dequantized once for all rows, some steps at a
    time."""
    steps, step_bytes = product.steps // product.num_parts, bytes_per_step(weight_kind)
    row_bytes, panel_bytes = product.steps * STEP_BYTES, product.steps * step_bytes
    weights = product.weights + panel * panel_bytes + part * steps * step_bytes
    inputs, numbers = product.inputs + part * steps * STEP_BYTES, scratch(DEQUANTIZED_VECTORS)
    for begin in range(0, steps, DEQUANTIZED_STEPS):
        count = min(DEQUANTIZED_STEPS, steps - begin)
        for column in range(columns):
            source = weights + column * panel_bytes + begin * step_bytes
            dequantize(source, count, numbers + column * count * VECTOR_BYTES)
        for wanted in range(first, last, TILE_ROWS):
            row = min(wanted, product.num_rows - TILE_ROWS)
            source = inputs + row * row_bytes + begin * STEP_BYTES
            # Rows that are in two tiles must not be added to twice.
            at = sums + (wanted - first) * SUMS_BYTES
            if begin == 0:
                clear(at, TILE_ROWS, columns)
            add_dequantized(kind, columns, numbers, source, row_bytes, count, at)
            if begin + count == steps and row < wanted:
                _move_rows(at, at - (wanted - row) * SUMS_BYTES, columns)


@inlined
def _move_rows(source: int, target: int, columns: int) -> None:
    """Move the sums of a tile to earlier rows."""
    for row in range(TILE_ROWS):
        for column in range(columns):
            at = row * SUMS_BYTES + column * VECTOR_BYTES
            store(load(FLOATS, source + at), target + at)


@inlined
def _add_part(part: int, value: Any, levels: int) -> None:
    """Add a part's sum to the tree. A level holds the sum of 2 ** level parts that waits for its
    neighbour."""
    while part & 1:
        value = load(FLOATS, levels) + value
        levels += _LEVEL_BYTES
        part >>= 1
    store(value, levels)


@inlined
def _whole(product: Product, levels: int) -> Any:
    """Address of the sums over all parts."""
    parts = product.num_parts
    while parts > 1:
        levels += _LEVEL_BYTES
        parts >>= 1
    return levels


@inlined
def _store_outputs(
    kind: Any, product: Product, start: int, columns: int, first: int, last: int, sums: int
) -> None:
    """Store sums as outputs, from output `start`."""
    for row in range(first, last):
        for column in range(columns):
            value = load(FLOATS, sums + (row - first) * SUMS_BYTES + column * VECTOR_BYTES)
            output = start + column * LANES
            count, index = product.num_outputs - output, row * product.num_outputs + output
            count = min(count, LANES)
            if product.is_partial:
                store_numbers(FLOAT32, value, product.out + index * 4, count)
            else:
                store_numbers(kind, value, product.out + index * itemsize(kind), count)


_are_bytes = constant_of_type(lambda kind: kind == types.int8)


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def multiply_grouped_parts_item(
    weight_kind: Any, kind: Any, product: Product, first: int, item: int, ticket: int
) -> None:
    """`multiply_grouped_item` with sums in parts; not for gated weights."""
    num_rows, row_bytes = product.num_rows, product.steps * STEP_BYTES
    groups = product.steps // STEPS
    part_groups, height = groups // product.num_parts, rows_of_tile(num_rows)
    last, span = min(num_rows, first + ROWS_AT_ONCE), panels_of_item(product)
    panels = range(item * span, min((item + 1) * span, product.num_outputs // LANES))
    sums, levels = scratch(_SUMS_VECTORS) + _MARGIN * SUMS_BYTES, scratch(_ALL_LEVELS)
    for panel in panels:
        column = (panel - panels.start) * VECTOR_BYTES
        for part in range(product.num_parts):
            blocks = product.weights + panel * panel_bytes(groups) + part * panel_bytes(part_groups)
            inputs = product.inputs + part * part_groups * STEPS * STEP_BYTES
            input_sums = product.beside + part * sums_bytes(part_groups)
            for wanted in range(first, last, height):
                row = min(wanted, num_rows - height)
                source = (
                    inputs + row * row_bytes,
                    row_bytes,
                    input_sums + row * sums_bytes(groups),
                    sums_bytes(groups),
                )
                at = sums + (row - first) * SUMS_BYTES
                multiply_grouped_tile(height, blocks, source, part_groups, at)
            for row in range(last - first):
                value = load(FLOATS, sums + row * SUMS_BYTES)
                _add_part(part, value, levels + row * SUMS_BYTES + column)
    if ticket == 0 or may_store(ticket):
        start, columns = panels.start * LANES, len(panels)
        _store_outputs(BFLOAT16, product, start, columns, first, last, _whole(product, levels))
