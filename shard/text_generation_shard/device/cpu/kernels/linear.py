"""Matrix products with packed weights: one tile loop for one row and for thousands.

Why it is fast: a decode step reads every weight once, and this loop does nothing else meanwhile.
Packed, 16 outputs lie side by side, so that there is nothing to add up across a vector, and every
thread reads its part of the matrix from front to back. Weights of bfloat16 are kept in 12 bits, see
`bfloat12`: a decode step has a quarter less to read. All products of the 125 M checkpoint on two
cores, in turn with 16 bits: 6.9 ms instead of 8.1 at 1 row, 7.1 for 8.9 at 8, 12 for 14 at 16, and
22 for 24 at 32.

Each output adds its products in the order of the inputs, whatever the number of rows: the same row
gives the same bits in any batch.
"""

from typing import Any, Final

import numpy as np
import torch
from numba import int64, njit, prange, typeof
from torch import Tensor

from text_generation_shard.device.cpu.kernels import WeightAddress, are_vectors_wide, bfloat12
from text_generation_shard.device.cpu.kernels.bfloat12 import add_exceptions, narrow
from text_generation_shard.device.cpu.kernels.llvm import (
    LANES,
    VECTOR_BYTES,
    address_of,
    array_at,
    call,
    outlined,
    scratch,
)
from text_generation_shard.device.cpu.kernels.product import (
    PRODUCT,
    ROWS_AT_ONCE,
    SUMS_BYTES,
    SUMS_WIDTH,
    TILE_COLUMNS,
    TILE_ROWS,
    Product,
    clear,
    put_rows,
)
from text_generation_shard.device.cpu.kernels.thread_pool import may_put
from text_generation_shard.device.cpu.kernels.tile import (
    Pages,
    bytes_per_step,
    dequantize,
    paged_tile,
    tile,
)
from text_generation_shard.device.cpu.kernels.vector import (
    ADDRESS,
    BFLOAT12,
    INT8,
    STEP_BYTES,
    aligned,
    inlined,
    marker,
    numbers_per_step,
)
from text_generation_shard.device.cpu.kernels.vector_code import spaced

# Of a tile of weights in 12 bits. One column for up to two tiles of rows, each of which makes
# bfloat16 of it beside its products for nothing; for more rows three columns, which have fewer
# inputs to load for each product: 3 to 9 % faster from 81 rows on, a tenth slower for 32.
_TALL_ROWS: Final = 16
_WIDE_ROWS: Final = 6
_SUMS_VECTORS: Final = ROWS_AT_ONCE * SUMS_WIDTH
# From so many rows on, whole numbers are made bfloat16 once for all of them ...
MANY_ROWS: Final = 32
# ... this many steps at a time, which with all rows stay in the second-level cache.
DEQUANTIZED_STEPS: Final = 768
DEQUANTIZED_VECTORS: Final = SUMS_WIDTH * DEQUANTIZED_STEPS

_TILE_1_1, _TILE_2_1, _TILE_4_1, _TILE_8_1 = tile(1, 1), tile(2, 1), tile(4, 1), tile(8, 1)
_TILE_1_3, _TILE_2_3, _TILE_4_3, _TILE_8_3 = tile(1, 3), tile(2, 3), tile(4, 3), tile(8, 3)
_TILE_16_1, _TILE_6_3 = tile(_TALL_ROWS, 1), tile(_WIDE_ROWS, 3)
_PAGED_8_1, _PAGED_8_3 = paged_tile(8, 1), paged_tile(8, 3)


def weights_marker(dtype: torch.dtype) -> Any:
    """Of weights of this type: bfloat16 are kept in 12 bits where there are tables for that."""
    return BFLOAT12 if dtype == torch.bfloat16 and are_vectors_wide() else marker(dtype)


def pack(weight: Tensor, steps_at_once: int = 1) -> Tensor:
    """weight [N, K] as [N / 16, steps, 16, numbers per step], aligned to vectors.

    Rows are filled up to a multiple of 16, inputs to one of so many steps, with zeros. What is int8
    is multiplied by bfloat16: see `_interleave_steps`.
    """
    per_step = _numbers_at_once(weight.dtype)
    outputs, inputs = weight.shape
    panels, steps = -(-outputs // LANES), -(-inputs // (per_step * steps_at_once)) * steps_at_once
    packed = aligned(panels * steps * LANES * per_step, weight.dtype)
    packed = packed.view(panels, steps, LANES, per_step)
    if outputs % LANES or inputs % per_step:
        padded = weight.new_zeros(panels * LANES, steps * per_step)
        padded[:outputs, :inputs] = weight
        weight = padded
    ordered = weight.view(panels, LANES, steps, per_step).transpose(1, 2)
    if weight.dtype == torch.int8:
        packed, ordered = packed.view(panels, steps, 4, 2, 4, 2), _interleave_steps(ordered)
    return packed.copy_(ordered)


def _numbers_at_once(dtype: torch.dtype) -> int:
    """How many numbers of an output lie side by side."""
    return 4 if dtype == torch.int8 else numbers_per_step(dtype)


def _interleave_steps(numbers: Tensor) -> Tensor:
    """int8 [panels, steps, 16, 4] as `tile` takes two steps of pairs at once: signed magnitudes,
    where of four outputs two numbers each are followed by their next two, [..., 4, 2, 4, 2]."""
    panels, steps = numbers.shape[:2]
    return signed(numbers).view(panels, steps, 4, 4, 2, 2).transpose(3, 4)


def signed(numbers: Tensor) -> Tensor:
    """int8 from -127 to 127 as a sign and a magnitude of 7 bits, or back."""
    return torch.where(numbers < 0, -128 - numbers, numbers)


class PackedWeight:
    """Owns a weight [N, K] in packed form and multiplies rows with it."""

    _is_gated = False
    _num_parts = 1

    def __init__(self, weight: Tensor, scales: Tensor | None = None) -> None:
        """`weight` is bfloat16 or float32; or int8, and the product of bfloat16 rows with it is
        multiplied by `scales` [N], float32."""
        assert (weight.dtype == torch.int8) == (scales is not None)
        self._weight_kind = INT8 if scales is not None else weights_marker(weight.dtype)
        is_narrow = type(self._weight_kind) is type(BFLOAT12)
        steps_at_once = bfloat12.STEPS if is_narrow else 1
        self._packed, self._beside = pack(weight, steps_at_once), scales
        if is_narrow:
            parts = self._packed.view(self._num_parts * len(self._packed), -1, LANES, 2)
            self._packed, self._beside = narrow(parts)
        elif scales is not None:
            # They are read a vector at a time.
            self._beside = torch.nn.functional.pad(scales, (0, -len(scales) % LANES))
        self._num_outputs, self._num_inputs = weight.shape
        # All that does not change from call to call: at one row a call takes 20 us.
        self._dtype = torch.bfloat16 if scales is not None else weight.dtype
        self._kind = marker(self._dtype)
        kinds = typeof(self._weight_kind), typeof(self._kind)
        self._code = address_of(self._item(), item_signature(*kinds))
        self._address = self._packed.data_ptr()
        self._beside_address = 0 if self._beside is None else self._beside.data_ptr()
        self._padding = -self._num_inputs % (_numbers_at_once(weight.dtype) * steps_at_once)
        self._steps = (self._num_inputs + self._padding) // numbers_per_step(self._dtype)
        self.nbytes = self._packed.nbytes + (0 if self._beside is None else self._beside.nbytes)

    @property
    def address(self) -> WeightAddress | None:
        """For `kernels.layers`; None if rows of inputs must be filled up for it."""
        if self._padding:
            return None
        where = self._address, self._beside_address
        return WeightAddress(self._weight_kind, *where, self._packed.nbytes, self._num_parts)

    @staticmethod
    def _item() -> Any:
        """The kernel that computes items of its products."""
        return multiply_item

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight: ids [T] → [T, K]."""
        panels, lanes = ids // LANES, ids % LANES
        if self._packed.dtype == torch.int8:
            rows = signed(self._packed[panels, :, lanes // 4, :, lanes % 4])
        else:
            rows = self._packed[panels, :, lanes]
        return rows.flatten(1)[:, : self._num_inputs]

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, K], contiguous → [T, N] of the same type."""
        if self._padding:
            hidden = torch.nn.functional.pad(hidden, (0, self._padding))
        rows, outputs = hidden.shape[0], self._num_outputs
        out = torch.empty((rows, outputs), dtype=self._dtype)
        product = Product(
            weights=self._address,
            beside=self._beside_address,
            inputs=hidden.data_ptr(),
            out=out.data_ptr(),
            num_rows=rows,
            steps=self._steps,
            num_outputs=outputs,
            is_gated=self._is_gated,
            num_parts=self._num_parts,
            is_partial=False,
        )
        multiply(self._code, self._weight_kind, self._kind, product)
        return out


class GatedWeight(PackedWeight):
    """A weight [2 * N, K], gates above what they let through: rows become silu(gate) * up [T, N].

    A thread computes both halves of its outputs, panel by panel, and so needs nothing that another
    core has just written: at one row, fetching that took longer than the arithmetic.
    """

    _is_gated = True

    def __init__(self, weight: Tensor, scales: Tensor | None = None) -> None:
        """N is a multiple of 16; the rest is as in PackedWeight."""

        def interleaved(rows: Tensor) -> Tensor:
            return rows.view(2, -1, LANES, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)

        super().__init__(
            interleaved(weight), None if scales is None else interleaved(scales).contiguous()
        )
        self._num_outputs //= 2


@njit(parallel=True, nogil=True, cache=True, boundscheck=False, error_model="numpy")
def multiply(code: int, weight_kind: Any, kind: Any, product: Product) -> None:
    """The product of packed weights; code: where `multiply_item` lies for these kinds."""
    for first in range(0, product.num_rows, ROWS_AT_ONCE):
        for item in prange(num_items(weight_kind, product.num_rows, product.num_outputs)):
            where = np.int64(first), np.int64(item), np.int64(0)
            call(code, (weight_kind, kind, product, *where))


def item_signature(weight_kind: Any, kind: Any) -> tuple[Any, ...]:
    """What `multiply_item` takes, for weights and rows of these types."""
    return weight_kind, kind, PRODUCT, int64, int64, int64


@inlined
def num_items(weight_kind: Any, num_rows: int, num_outputs: int) -> Any:
    """How many items the product has for at most ROWS_AT_ONCE of so many rows."""
    return -(-num_panels(num_outputs) // tile_columns(weight_kind, num_rows, num_outputs))


@inlined
def num_panels(num_outputs: int) -> int:
    """Outputs lie side by side in panels."""
    return -(-num_outputs // LANES)


@inlined
def item_bytes(weight_kind: Any, product: Product) -> Any:
    """Of the weights, what an item reads; they lie one behind the other."""
    columns = tile_columns(weight_kind, product.num_rows, product.num_outputs)
    halves = 2 if product.is_gated else 1
    return halves * columns * product.steps * bytes_per_step(weight_kind)


@inlined
def are_narrow(weight_kind: Any) -> Any:
    """Whether weights are BFLOAT12."""
    return bytes_per_step(weight_kind) == bfloat12.STEP_BYTES


@inlined
def tile_rows(weight_kind: Any, columns: int, num_rows: int, left: int) -> Any:
    """Rows of the next tile if so many are left, of at most all rows."""
    rows = TILE_ROWS
    if are_narrow(weight_kind):
        if columns > 1:
            # Two tiles, or the last one.
            return 2 * _WIDE_ROWS if left > _WIDE_ROWS else _WIDE_ROWS
        # One tile for the last rows, but where that takes longer than one of 8 and one of 4.
        rows = _TALL_ROWS if left > 12 else TILE_ROWS
        while rows // 2 >= left:
            rows //= 2
    while rows > num_rows:
        rows //= 2
    return rows


@inlined
def tile_columns(weight_kind: Any, num_rows: int, num_outputs: int) -> Any:
    # Where memory is the limit, one panel after another is one stream from front to back.
    is_stream = num_rows < (2 * _TALL_ROWS + 1 if are_narrow(weight_kind) else 4)
    is_stream &= bytes_per_step(weight_kind) >= bfloat12.STEP_BYTES
    return 1 if is_stream or num_panels(num_outputs) < TILE_COLUMNS else TILE_COLUMNS


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def multiply_item(
    weight_kind: Any, kind: Any, product: Product, first: int, item: int, ticket: int
) -> None:
    """One of `num_items`: of a tile's outputs, ROWS_AT_ONCE rows from the first on. ticket: see
    `may_put`, for few rows; 0: there is none.

    Tiles that would reach over the end begin earlier: what is computed twice comes out alike.
    """
    columns = tile_columns(weight_kind, product.num_rows, product.num_outputs)
    panel = min(item * columns, num_panels(product.num_outputs) - columns)
    last, sums = min(product.num_rows, first + ROWS_AT_ONCE), scratch(_SUMS_VECTORS)
    # What is 12 bits is made bfloat16 beside the products.
    is_small = bytes_per_step(weight_kind) < bfloat12.STEP_BYTES
    if is_small and product.num_rows >= MANY_ROWS:
        _multiply_dequantized(weight_kind, kind, product, panel, columns, first, last, sums)
        return
    halves = 2 if product.is_gated else 1
    row_bytes, panel_bytes = product.steps * STEP_BYTES, product.steps * bytes_per_step(weight_kind)
    weights = product.weights + halves * panel * panel_bytes
    wanted = first
    while wanted < last:
        rows = tile_rows(weight_kind, columns, product.num_rows, last - wanted)
        row = min(wanted, product.num_rows - rows)
        source = product.inputs + row * row_bytes
        # Of few rows all sums are there before the first result is put.
        at = sums + (row if ticket else 0) * SUMS_BYTES
        for half in range(halves):
            vectors = weights + half * columns * panel_bytes
            to = at + half * columns * VECTOR_BYTES
            steps = product.steps
            multiply_tile(
                weight_kind, rows, columns, vectors, panel_bytes, source, row_bytes, steps, to
            )
        wanted = row + rows
        if are_narrow(weight_kind):
            panels = halves * panel, halves * columns, halves * num_panels(product.num_outputs)
            add_exceptions(product.beside, panels, source, row_bytes, rows, (at, SUMS_BYTES))
        if not ticket:
            put_rows(weight_kind, kind, product, panel, columns, at, row, rows)
    if ticket and may_put(ticket):
        put_rows(weight_kind, kind, product, panel, columns, sums, 0, product.num_rows)


@njit(inline="always")
def _multiply_dequantized(
    weight_kind: Any,
    kind: Any,
    product: Product,
    panel: int,
    columns: int,
    first: int,
    last: int,
    sums: int,
) -> None:
    """`multiply_item` for many rows: weights become numbers of the rows' kind once for all rows,
    some steps at a time."""
    halves, steps = 2 if product.is_gated else 1, product.steps
    row_bytes, panel_bytes = steps * STEP_BYTES, steps * bytes_per_step(weight_kind)
    weights = product.weights + halves * panel * panel_bytes
    numbers = scratch(DEQUANTIZED_VECTORS)
    for begin in range(0, steps, DEQUANTIZED_STEPS):
        count = min(DEQUANTIZED_STEPS, steps - begin)
        for column in range(halves * columns):
            source = weights + column * panel_bytes + begin * bytes_per_step(weight_kind)
            dequantize(source, count, numbers + column * count * VECTOR_BYTES)
        for wanted in range(first, last, TILE_ROWS):
            row = min(wanted, product.num_rows - TILE_ROWS)
            source = product.inputs + row * row_bytes + begin * STEP_BYTES
            at = sums + (wanted - first if steps > DEQUANTIZED_STEPS else 0) * SUMS_BYTES
            for half in range(halves):
                to = at + half * columns * VECTOR_BYTES
                if begin == 0:
                    clear(to, TILE_ROWS, columns)
                part = numbers + half * columns * count * VECTOR_BYTES
                add_dequantized(kind, columns, part, source, row_bytes, count, to)
            if begin + count == steps:
                put_rows(weight_kind, kind, product, panel, columns, at, row, TILE_ROWS)


@njit(inline="always")
def add_dequantized(
    kind: Any, columns: int, numbers: int, inputs: int, row_bytes: int, steps: int, sums: int
) -> None:
    """Sums of many rows grow by the products of what is dequantized."""
    address = scratch(1)
    array_at(ADDRESS, address)[0] = numbers
    pages = Pages(address, 1, 0, steps * VECTOR_BYTES, steps)
    if columns == 3:
        outlined(_PAGED_8_3, (kind, pages, inputs, row_bytes, sums, SUMS_BYTES))
    else:
        outlined(_PAGED_8_1, (kind, pages, inputs, row_bytes, sums, SUMS_BYTES))


@njit(inline="always")
def multiply_tile(
    kind: Any,
    rows: int,
    columns: int,
    weights: int,
    panel_bytes: int,
    inputs: int,
    row_bytes: int,
    steps: int,
    sums: int,
) -> None:
    given = inputs, row_bytes, steps, sums, SUMS_BYTES
    if columns == 1:
        _multiply_column(kind, rows, (weights,), given)
        return
    starts = spaced(3, weights, panel_bytes)
    if are_narrow(kind):
        for row in range(0, rows, _WIDE_ROWS):
            at, to = inputs + row * row_bytes, sums + row * SUMS_BYTES
            outlined(_TILE_6_3, (kind, starts, at, row_bytes, steps, to, SUMS_BYTES))
    elif rows == 8:
        outlined(_TILE_8_3, (kind, starts, *given))
    elif rows == 4:
        outlined(_TILE_4_3, (kind, starts, *given))
    elif rows == 2:
        outlined(_TILE_2_3, (kind, starts, *given))
    else:
        outlined(_TILE_1_3, (kind, starts, *given))


@njit(inline="always")
def _multiply_column(kind: Any, rows: int, starts: Any, given: Any) -> None:
    if rows == _TALL_ROWS:
        # Only of weights in 12 bits.
        outlined(_TILE_16_1, (kind, starts, *given))
    elif rows == 8:
        outlined(_TILE_8_1, (kind, starts, *given))
    elif rows == 4:
        outlined(_TILE_4_1, (kind, starts, *given))
    elif rows == 2:
        outlined(_TILE_2_1, (kind, starts, *given))
    else:
        outlined(_TILE_1_1, (kind, starts, *given))
