"""Matrix products with packed weights: one tile loop for any number of rows.

Why it is fast: a decode step reads every weight once, and this loop does little else. A vector has
16 outputs, so that no sum across a vector is needed, and each thread reads a contiguous part of the
matrix. bfloat16 weights are stored in 12 bits, see `bfloat12`: a decode step reads a quarter less.

Each output adds its products in the order of the inputs, for any number of rows: a row's result has
the same bits in any batch.

int4 weights have a scale and a zero for each group of 32 inputs. A block, which is contiguous, has
two groups of 16 outputs: a vector of zeros, a vector of scales, and for each group four vectors of
numbers, four numbers per 16 bits. A table of 16 converts numbers to bfloat16, with one shift and
one permutation for 32 numbers. The contribution of the zeros is also a product of pairs: with the
input sums of two groups. These sums are rounded to bfloat16, like the inputs.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import int64, njit, prange, types
from numba.extending import overload

from text_generation_shard.device.cpu.kernels import bfloat12, llvm, vector
from text_generation_shard.device.cpu.kernels.bfloat12 import add_exceptions, load_step
from text_generation_shard.device.cpu.kernels.llvm import FLOATS, INTS, LANES, VECTOR_BYTES, WORDS
from text_generation_shard.device.cpu.kernels.thread_pool import may_store
from text_generation_shard.device.cpu.kernels.tile import (
    LEVELS_VECTORS,
    PRODUCT,
    ROWS_AT_ONCE,
    SUMS_BYTES,
    SUMS_WIDTH,
    TILE_COLUMNS,
    TILE_ROWS,
    Outputs,
    Pages,
    Product,
    add_part,
    by_size,
    bytes_per_step,
    clear,
    dequantize,
    num_panels,
    paged_tile,
    sized,
    store_rows,
    tile,
)
from text_generation_shard.device.cpu.kernels.vector import (
    ADDRESS,
    BFLOAT16,
    STEP_BYTES,
    inlined,
    spaced,
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
_NUMBER_BITS: Final = 4

# A lookup uses 5 bits: a number, and an arbitrary bit of the next number. So the table holds each
# number twice.
_NUMBERS: Final = np.tile(np.arange(-8, 8, dtype=np.float32), 2).view(np.uint32) >> 16
_TABLE: Final = llvm.Table(WORDS, _NUMBERS.tolist())

# From this number of rows, all threads compute the input sums.
_SHARED_ROWS: Final = 8
# Rows of the largest tile; the others have 8, 4, 2 or 1.
_MOST_ROWS: Final = 12
# For few rows: most panels of an item, and bytes of weights that suffice for an item.
_MOST_PANELS: Final = 4
_ITEM_BYTES: Final = 20 * 1024

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
        return halves * panel_bytes(product.steps // STEPS)
    return halves * product.steps * bytes_per_step(weight_kind)


@inlined
def _tiles_of_item(weight_kind: Any, product: Product) -> Any:
    """Neighbouring tiles of columns that an item computes."""
    if are_grouped(weight_kind) and product.num_rows <= TILE_ROWS:
        # Taking an item has a cost, so small panels are combined.
        return max(1, min(_MOST_PANELS, _ITEM_BYTES // _panel_bytes(weight_kind, product)))
    return 1


@inlined
def _are_narrow(weight_kind: Any) -> Any:
    """Whether weights are BFLOAT12."""
    return bytes_per_step(weight_kind) == bfloat12.STEP_BYTES


@inlined
def _tile_rows(weight_kind: Any, columns: int, num_rows: int, left: int) -> Any:
    """Rows of the next tile if `left` of `num_rows` rows are left."""
    if are_grouped(weight_kind):
        return _grouped_rows(num_rows)
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
    return _sum_groups_of_part if weight_kind == types.uint8 else _sum_panels


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
            target = sums + column * VECTOR_BYTES, SUMS_BYTES
            add_exceptions(product.beside, number, all_parts, source, row_bytes, target, rows)


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


@inlined
def _sum_group(inputs: int) -> Any:
    """The sum of the 32 bfloat16 at an address, in a fixed order."""
    pairs = llvm.load(INTS, inputs)
    # A bfloat16 is the upper half of a float32.
    lower = llvm.reinterpreted(FLOATS, pairs << 16)
    return vector.sum_of_lanes(lower + llvm.reinterpreted(FLOATS, pairs & -(2**16)))


def _grouped_tile(rows: int) -> Any:
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
                word, shift = step // NUMBERS_PER_WORD, step % NUMBERS_PER_WORD * _NUMBER_BITS
                own = at + step * STEP_BYTES
                products = vector.add_steps(
                    BFLOAT16, products, _look_up, start, (word, shift), own, stride
                )
            scales_at = block + _SCALES_AT + member * _SCALE_BYTES
            scales = vector.widen(llvm.load(llvm.SHORTS, scales_at))
            totals = vector.add_scaled(totals, scales, products)
        vector.store_sums(totals, 1, sums, SUMS_BYTES)

    return sized(multiply_blocks, rows, 1)


@inlined
def _look_up(kind: Any, numbers: int, word: int, shift: int) -> Any:
    """The numbers of one step as pairs of bfloat16."""
    words = llvm.load(WORDS, numbers + word * VECTOR_BYTES)
    return (llvm.reinterpreted(INTS, vector.look_up(_TABLE, words >> shift)),)


_by_rows: Final = by_size({rows: _grouped_tile(rows) for rows in (_MOST_ROWS, 8, 4, 2, 1)})


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def sum_groups(inputs: int, input_sums: int, row: int, groups: int) -> None:
    """Write the input sums of a row's groups as pairs of bfloat16, for the product."""
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


def _sum_groups_of_part(weight_kind: Any, own: Outputs, part: int, row: int, rows: int) -> None:
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


@inlined
def _grouped_rows(num_rows: int) -> int:
    # With int4 weights, larger tiles are faster, but the last one may compute some rows twice.
    are_many = num_rows >= _MOST_ROWS and (
        -num_rows % _MOST_ROWS <= -num_rows % TILE_ROWS + num_rows // 16
    )
    rows = min(num_rows, TILE_ROWS)
    while rows & (rows - 1):
        rows &= rows - 1
    return _MOST_ROWS if are_many else rows


@inlined
def sums_bytes(groups: int) -> int:
    """Bytes of the input sums of a row."""
    return -(-groups // 2) * STEP_BYTES


@inlined
def panel_bytes(groups: int) -> int:
    """Bytes of a panel with this number of groups."""
    return groups // 2 * BLOCK_BYTES + groups % 2 * (BLOCK_BYTES - VECTORS * VECTOR_BYTES)
