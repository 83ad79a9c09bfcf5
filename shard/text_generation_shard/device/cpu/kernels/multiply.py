"""Matrix products with packed weights: one tile loop for any number of rows.

Why it is fast: a decode step reads every weight once, and this loop does little else. A vector has
16 outputs, so that no sum across a vector is needed, and each thread reads a contiguous part of the
matrix. bfloat16 weights are stored in 12 bits, see `bfloat12`: a decode step reads a quarter less.

Each output adds its products in the order of the inputs, for any number of rows: a row's result has
the same bits in any batch.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import int64, njit, prange, types
from numba.extending import overload

from text_generation_shard.device.cpu.kernels import bfloat12, grouped, llvm
from text_generation_shard.device.cpu.kernels.bfloat12 import add_exceptions
from text_generation_shard.device.cpu.kernels.llvm import VECTOR_BYTES
from text_generation_shard.device.cpu.kernels.product import (
    LEVELS_VECTORS,
    PRODUCT,
    ROWS_AT_ONCE,
    SUMS_BYTES,
    SUMS_WIDTH,
    TILE_COLUMNS,
    TILE_ROWS,
    Outputs,
    Product,
    add_part,
    clear,
    num_panels,
    store_rows,
)
from text_generation_shard.device.cpu.kernels.thread_pool import may_store
from text_generation_shard.device.cpu.kernels.tile import (
    Pages,
    by_size,
    bytes_per_step,
    dequantize,
    paged_tile,
    tile,
)
from text_generation_shard.device.cpu.kernels.vector import ADDRESS, STEP_BYTES, inlined, spaced

# Rows of a tile with 12-bit weights: of a tall tile of one column, for up to two tiles of rows,
# which hides the decoding behind the products; of a wide tile of three columns, for more rows,
# which loads fewer inputs per product.
_TALL_ROWS: Final = 16
_WIDE_ROWS: Final = 6
_SUMS_VECTORS: Final = ROWS_AT_ONCE * SUMS_WIDTH
# From this number of rows, int8 weights are dequantized once for all rows ...
MANY_ROWS: Final = 32
# ... this many steps at a time, which with all rows stay in the second-level cache.
DEQUANTIZED_STEPS: Final = 768
DEQUANTIZED_VECTORS: Final = SUMS_WIDTH * DEQUANTIZED_STEPS

_WIDE_TILE: Final = tile(_WIDE_ROWS, 3)
# The first one only for 12-bit weights.
_by_rows_of_1 = by_size({rows: tile(rows, 1) for rows in (_TALL_ROWS, 8, 4, 2, 1)})
_by_rows_of_3 = by_size({rows: tile(rows, 3) for rows in (8, 4, 2, 1)})
_by_columns = by_size({columns: paged_tile(8, columns) for columns in (3, 1)})

are_grouped = llvm.constant_of_type(lambda kind: kind == types.uint8)


@njit(parallel=True, nogil=True, cache=True, boundscheck=False, error_model="numpy")
def multiply(code: int, weight_kind: Any, kind: Any, product: Product) -> None:
    """The product with packed weights; code: address of `multiply_item` for these kinds."""
    items, _ = cost_of_items(weight_kind, product)
    for first in range(0, product.num_rows, ROWS_AT_ONCE):
        for item in prange(items):
            where = np.int64(first), np.int64(item), np.int64(0)
            llvm.call(code, (weight_kind, kind, product, *where))


def multiply_signature(weight_kind: Any, kind: Any) -> tuple[Any, ...]:
    """Signature of `multiply_item` for weights and rows of these types."""
    return weight_kind, kind, PRODUCT, int64, int64, int64


@inlined
def cost_of_items(weight_kind: Any, product: Product) -> Any:
    """Items of a product for each ROWS_AT_ONCE rows, and bytes of weights per item; items' weights
    are contiguous."""
    columns, tiles = _tile_columns(weight_kind, product), _tiles_of_item(weight_kind, product)
    count = -(-num_panels(product.num_outputs) // (columns * tiles))
    return count, columns * tiles * _panel_bytes(weight_kind, product)


@inlined
def _panel_bytes(weight_kind: Any, product: Product) -> Any:
    """Bytes of the weights of LANES outputs."""
    halves = 2 if product.is_gated else 1
    if are_grouped(weight_kind):
        return halves * grouped.panel_bytes(product.steps // grouped.STEPS)
    return halves * product.steps * bytes_per_step(weight_kind)


@inlined
def _tiles_of_item(weight_kind: Any, product: Product) -> Any:
    """Neighbouring tiles of columns that an item computes."""
    if are_grouped(weight_kind):
        return grouped.tiles_of_item(_panel_bytes(weight_kind, product), product.num_rows)
    return 1


@inlined
def _are_narrow(weight_kind: Any) -> Any:
    """Whether weights are BFLOAT12."""
    return bytes_per_step(weight_kind) == bfloat12.STEP_BYTES


@inlined
def _tile_rows(weight_kind: Any, columns: int, num_rows: int, left: int) -> Any:
    """Rows of the next tile if `left` of `num_rows` rows are left."""
    if are_grouped(weight_kind):
        return grouped.tile_rows(num_rows)
    rows = TILE_ROWS
    if _are_narrow(weight_kind):
        if columns > 1:
            # Two tiles, or the last one.
            return 2 * _WIDE_ROWS if left > _WIDE_ROWS else _WIDE_ROWS
        # One tile for the last rows, unless two tiles of 8 and 4 rows are faster.
        rows = _TALL_ROWS if left > 12 else TILE_ROWS
        while rows // 2 >= left:
            rows //= 2
    while rows > num_rows:
        rows //= 2
    return rows


@inlined
def _tile_columns(weight_kind: Any, product: Product) -> Any:
    # If memory bandwidth is the limit, one column reads the weights as one stream.
    few = 2 * _TALL_ROWS + 1 if _are_narrow(weight_kind) else 4
    is_stream = product.num_rows < few and bytes_per_step(weight_kind) >= bfloat12.STEP_BYTES
    is_single = are_grouped(weight_kind) or is_stream
    return 1 if is_single or num_panels(product.num_outputs) < TILE_COLUMNS else TILE_COLUMNS


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def multiply_item(
    weight_kind: Any, kind: Any, product: Product, first: int, item: int, ticket: int
) -> None:
    """Compute an item, see `cost_of_items`: some outputs for ROWS_AT_ONCE rows from row `first`.
    ticket: see `may_store`, for few rows; 0: none.

    Tiles that would exceed the end begin earlier; results computed twice are identical.
    """
    columns, tiles = _tile_columns(weight_kind, product), _tiles_of_item(weight_kind, product)
    last_panel = num_panels(product.num_outputs) - columns
    last = min(product.num_rows, first + ROWS_AT_ONCE)
    sums, levels = llvm.scratch(_SUMS_VECTORS), llvm.scratch(LEVELS_VECTORS)
    begin, end = item * tiles * columns, min((item + 1) * tiles * columns, last_panel + columns)
    # Weights of 12 and 4 bits are decoded within the tile instead.
    is_small = bytes_per_step(weight_kind) < bfloat12.STEP_BYTES and not are_grouped(weight_kind)
    if is_small and product.num_rows >= MANY_ROWS:
        own = Outputs(product, min(begin, last_panel), columns, sums)
        for part in range(product.num_parts):
            _multiply_dequantized(weight_kind, kind, own, part, first, last, levels)
        return
    for panel in range(begin, end, columns):
        # For few rows, all sums are complete before the first result is stored.
        start = sums + (panel - begin) * TILE_ROWS * SUMS_BYTES if ticket else sums
        wanted = first
        while wanted < last:
            rows = _tile_rows(weight_kind, columns, product.num_rows, last - wanted)
            row = min(wanted, product.num_rows - rows)
            at = start + row * SUMS_BYTES if ticket else start
            own = Outputs(product, min(panel, last_panel), columns, at)
            for part in range(product.num_parts):
                _sum_part(weight_kind, own, part, row, rows)
                if product.num_parts > 1:
                    add_part(weight_kind, own, part, rows, levels)
            wanted = row + rows
            if not ticket:
                store_rows(weight_kind, kind, own, row, rows)
    if ticket and may_store(ticket):
        for panel in range(begin, end, columns):
            at = sums + (panel - begin) * TILE_ROWS * SUMS_BYTES
            own = Outputs(product, min(panel, last_panel), columns, at)
            store_rows(weight_kind, kind, own, 0, product.num_rows)


# A declaration: compiled code calls the function that `overload` returns.
def _sum_part(weight_kind: Any, own: Outputs, part: int, row: int, rows: int) -> None:
    """Compute the sums of rows over one part of the inputs."""
    raise NotImplementedError


@overload(_sum_part, {"forceinline": True, "error_model": "numpy"}, strict=False)
def _choose_sum_part(weight_kind: Any, *_: Any) -> Callable[..., None]:
    return grouped.sum_part if weight_kind == types.uint8 else _sum_panels


def _sum_panels(weight_kind: Any, own: Outputs, part: int, row: int, rows: int) -> None:
    product, panel, columns, sums = own
    steps, step_bytes = product.steps // product.num_parts, bytes_per_step(weight_kind)
    row_bytes, panel_bytes = product.steps * STEP_BYTES, product.steps * step_bytes
    halves = 2 if product.is_gated else 1
    weights = product.weights + halves * panel * panel_bytes + part * steps * step_bytes
    source = product.inputs + row * row_bytes + part * steps * STEP_BYTES
    for half in range(halves):
        vectors = weights + half * columns * panel_bytes
        to = sums + half * columns * VECTOR_BYTES
        given = source, row_bytes, steps, to, SUMS_BYTES
        if columns == 1:
            _by_rows_of_1(rows, (weight_kind, (vectors,), *given))
        elif _are_narrow(weight_kind):
            _multiply_wide(weight_kind, rows, spaced(3, vectors, panel_bytes), given)
        else:
            _by_rows_of_3(rows, (weight_kind, spaced(3, vectors, panel_bytes), *given))
    if _are_narrow(weight_kind):
        # Each part has its own exceptions.
        all_parts = halves * num_panels(product.num_outputs) * product.num_parts
        for column in range(halves * columns):
            number = (halves * panel + column) * product.num_parts + part
            to = sums + column * VECTOR_BYTES
            add_exceptions(product.beside, number, all_parts, source, row_bytes, rows, to)


@inlined
def _multiply_wide(weight_kind: Any, rows: int, starts: Any, given: Any) -> None:
    inputs, row_bytes, steps, sums, sums_bytes = given
    for row in range(0, rows, _WIDE_ROWS):
        at, to = inputs + row * row_bytes, sums + row * sums_bytes
        llvm.outlined(_WIDE_TILE, (weight_kind, starts, at, row_bytes, steps, to, sums_bytes))


@njit(inline="always")
def _multiply_dequantized(
    weight_kind: Any, kind: Any, own: Outputs, part: int, first: int, last: int, levels: int
) -> None:
    """`multiply_item` for many rows and one part: weights are dequantized once for all rows, some
    steps at a time. The last part stores the outputs."""
    product, panel, columns, sums = own
    halves, steps = 2 if product.is_gated else 1, product.steps // product.num_parts
    step_bytes = bytes_per_step(weight_kind)
    row_bytes, panel_bytes = product.steps * STEP_BYTES, product.steps * step_bytes
    weights = product.weights + halves * panel * panel_bytes + part * steps * step_bytes
    inputs, numbers = product.inputs + part * steps * STEP_BYTES, llvm.scratch(DEQUANTIZED_VECTORS)
    for begin in range(0, steps, DEQUANTIZED_STEPS):
        count = min(DEQUANTIZED_STEPS, steps - begin)
        for column in range(halves * columns):
            source = weights + column * panel_bytes + begin * step_bytes
            dequantize(source, count, numbers + column * count * VECTOR_BYTES)
        for wanted in range(first, last, TILE_ROWS):
            row, place = min(wanted, product.num_rows - TILE_ROWS), (wanted - first) * SUMS_BYTES
            source = inputs + row * row_bytes + begin * STEP_BYTES
            at = sums + (place if steps > DEQUANTIZED_STEPS else 0)
            for half in range(halves):
                to = at + half * columns * VECTOR_BYTES
                if begin == 0:
                    clear(to, TILE_ROWS, columns)
                vectors = numbers + half * columns * count * VECTOR_BYTES
                _add_dequantized(kind, columns, vectors, source, row_bytes, count, to)
            if begin + count == steps:
                these = Outputs(product, panel, columns, at)
                if product.num_parts > 1:
                    add_part(weight_kind, these, part, TILE_ROWS, levels + place)
                if part == product.num_parts - 1:
                    store_rows(weight_kind, kind, these, row, TILE_ROWS)


@njit(inline="always")
def _add_dequantized(
    kind: Any, columns: int, numbers: int, inputs: int, row_bytes: int, steps: int, sums: int
) -> None:
    """Add the products of rows and dequantized weights to the sums."""
    address = llvm.scratch(1)
    llvm.array_at(ADDRESS, address)[0] = numbers
    pages = Pages(address, 1, 0, steps * VECTOR_BYTES, steps)
    _by_columns(columns, (kind, pages, inputs, row_bytes, sums, SUMS_BYTES))
