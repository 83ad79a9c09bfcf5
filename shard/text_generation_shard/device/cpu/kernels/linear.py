"""Matrix products with packed weights: one tile loop for any number of rows.

Why it is fast: a decode step reads every weight once, and this loop does little else. A vector has
16 outputs, so that no sum across a vector is needed, and each thread reads a contiguous part of the
matrix. bfloat16 weights are stored in 12 bits, see `bfloat12`: a decode step reads a quarter less.

Each output adds its products in the order of the inputs, for any number of rows: a row's result has
the same bits in any batch.
"""

from typing import Any, Final

import numpy as np
import torch
from numba import int64, njit, prange, typeof
from torch import Tensor

from text_generation_shard.device.cpu.kernels import are_vectors_wide, bfloat12
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
    LEVELS_VECTORS,
    PRODUCT,
    ROWS_AT_ONCE,
    SUMS_BYTES,
    SUMS_WIDTH,
    TILE_COLUMNS,
    TILE_ROWS,
    Product,
    add_part,
    clear,
    num_parts,
    store_rows,
)
from text_generation_shard.device.cpu.kernels.thread_pool import may_store
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
    tensor_address,
)
from text_generation_shard.device.cpu.kernels.vector_code import spaced

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

_TILE_1_1, _TILE_2_1, _TILE_4_1, _TILE_8_1 = tile(1, 1), tile(2, 1), tile(4, 1), tile(8, 1)
_TILE_1_3, _TILE_2_3, _TILE_4_3, _TILE_8_3 = tile(1, 3), tile(2, 3), tile(4, 3), tile(8, 3)
_TILE_16_1, _TILE_6_3 = tile(_TALL_ROWS, 1), tile(_WIDE_ROWS, 3)
_PAGED_8_1, _PAGED_8_3 = paged_tile(8, 1), paged_tile(8, 3)


def weights_marker(dtype: torch.dtype) -> Any:
    """The marker of weights of this dtype: bfloat16 is stored in 12 bits if the processor has the
    tables for it."""
    return BFLOAT12 if dtype == torch.bfloat16 and are_vectors_wide() else marker(dtype)


def pack(weight: Tensor, steps_at_once: int = 1) -> Tensor:
    """weight [N, K] as [N / 16, steps, 16, numbers per step], aligned to vectors.

    Rows are zero-padded to a multiple of 16, inputs to a multiple of `steps_at_once` steps. For
    int8 see `_interleave_steps`.
    """
    per_step = _numbers_at_once(weight.dtype)
    outputs, inputs = weight.shape
    panels, steps = -(-outputs // LANES), -(-inputs // (per_step * steps_at_once)) * steps_at_once
    packed = aligned(panels * steps * LANES * per_step, weight.dtype)
    packed = packed.view(panels, steps, LANES, per_step)
    if weight.shape != (panels * LANES, steps * per_step):
        padded = weight.new_zeros(panels * LANES, steps * per_step)
        padded[:outputs, :inputs] = weight
        weight = padded
    ordered = weight.view(panels, LANES, steps, per_step).transpose(1, 2)
    if weight.dtype == torch.int8:
        packed, ordered = packed.view(panels, steps, 4, 2, 4, 2), _interleave_steps(ordered)
    elif weight.dtype == torch.bfloat16 and weight.is_contiguous():
        # Copying pairs of numbers as int32 is faster.
        words = weight.view(torch.int32).view(panels, LANES, steps).transpose(1, 2)
        packed.view(torch.int32)[..., 0].copy_(words)
        return packed
    return packed.copy_(ordered)


def _numbers_at_once(dtype: torch.dtype) -> int:
    """Contiguous numbers of one output."""
    return 4 if dtype == torch.int8 else numbers_per_step(dtype)


def _interleave_steps(numbers: Tensor) -> Tensor:
    """Arrange int8 [panels, steps, 16, 4] for `tile`, which takes two steps of pairs at once:
    signed magnitudes [..., 4, 2, 4, 2], where the first pairs of four outputs precede their second
    pairs."""
    panels, steps = numbers.shape[:2]
    return signed(numbers).view(panels, steps, 4, 4, 2, 2).transpose(3, 4)


def signed(numbers: Tensor) -> Tensor:
    """Convert int8 from -127 to 127 to a sign and a magnitude of 7 bits, or back."""
    return torch.where(numbers < 0, -128 - numbers, numbers)


class PackedWeight:
    """See `Matrix`. Owns a weight [N, K] in packed form, which the runner's passes read."""

    kind: str
    # A marker of `vector`; addresses of the packed weight and of `Product.beside`; see `num_parts`;
    # and number of zeros that are added to each row, which a pass does not do.
    weight_kind: Any
    address: int
    beside_address: int
    num_parts: int
    padding: int

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor | None = None,
        is_gated: bool = False,
        part: int | None = None,
    ) -> None:
        """`weight` is bfloat16 or float32; or int8 with float32 `scales` [N], for bfloat16 rows.

        `is_gated`: the weight is [2 * N, K], gates before ups, N a multiple of 16: rows become
        silu(gate) * up [T, N]. A thread computes both halves of its outputs, panel by panel, so
        that it reads nothing that another core has just written. part: inputs in a part of a sum,
        see `num_parts`."""
        assert (weight.dtype == torch.int8) == (scales is not None)
        self._num_outputs, self._num_inputs = weight.shape
        self._is_gated = is_gated
        if is_gated:
            weight, self._num_outputs = interleaved(weight), self._num_outputs // 2
            scales = None if scales is None else interleaved(scales).contiguous()
        self.weight_kind = INT8 if scales is not None else weights_marker(weight.dtype)
        is_narrow = type(self.weight_kind) is type(BFLOAT12)
        steps_at_once = bfloat12.STEPS if is_narrow else 1
        unit = _numbers_at_once(weight.dtype) * steps_at_once
        self.num_parts = num_parts(self._num_inputs, part, unit)
        packed, beside = pack(weight, steps_at_once), scales
        if is_narrow:
            packed, beside = narrow(packed.view(self.num_parts * len(packed), -1, LANES, 2))
        elif scales is not None:
            # Scales are read in whole vectors.
            beside = torch.nn.functional.pad(scales, (0, -len(scales) % LANES))
        self._dtype = torch.bfloat16 if scales is not None else weight.dtype
        self.kind = str(weight.dtype).removeprefix("torch.")
        self.padding = -self._num_inputs % unit
        self._keep(packed, beside, multiply_item)

    def _keep(self, packed: Tensor, beside: Tensor | None, multiply_item: Any) -> None:
        """Keep what does not change between calls, because a call with one row is short."""
        self._packed, self._beside = packed, beside
        self._kind = marker(self._dtype)
        kinds = typeof(self.weight_kind), typeof(self._kind)
        self._code = address_of(multiply_item, item_signature(*kinds))
        self.address, self.beside_address = tensor_address(packed), tensor_address(beside)
        self._steps = (self._num_inputs + self.padding) // numbers_per_step(self._dtype)
        self.nbytes = packed.nbytes + (0 if beside is None else beside.nbytes)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight: ids [T] → [T, K]."""
        panels, lanes = ids // LANES, ids % LANES
        if self._packed.dtype == torch.int8:
            rows = signed(self._packed[panels, :, lanes // 4, :, lanes % 4])
        else:
            rows = self._packed[panels, :, lanes]
        return rows.flatten(1)[:, : self._num_inputs]

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Matrix; hidden is of the dtype of `out`."""
        hidden = hidden.contiguous()
        if self.padding:
            hidden = torch.nn.functional.pad(hidden, (0, self.padding))
        rows, outputs = hidden.shape[0], self._num_outputs
        out = torch.empty((rows, outputs), dtype=self._dtype)
        product = Product(
            weights=self.address,
            beside=self.beside_address,
            inputs=tensor_address(hidden, self._dtype),
            out=tensor_address(out),
            num_rows=rows,
            steps=self._steps,
            num_outputs=outputs,
            is_gated=self._is_gated,
            num_parts=self.num_parts,
            is_partial=False,
        )
        self._multiply(product)
        return out if bias is None else out.add_(bias)

    def _multiply(self, product: Product) -> None:
        multiply(self._code, self.weight_kind, self._kind, product)


def interleaved(rows: Tensor) -> Tensor:
    """Rows [2 * N, …] of a gated weight, panel by panel: gates before ups."""
    return rows.view(2, -1, LANES, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


@njit(parallel=True, nogil=True, cache=True, boundscheck=False, error_model="numpy")
def multiply(code: int, weight_kind: Any, kind: Any, product: Product) -> None:
    """The product with packed weights; code: address of `multiply_item` for these kinds."""
    for first in range(0, product.num_rows, ROWS_AT_ONCE):
        for item in prange(num_items(weight_kind, product.num_rows, product.num_outputs)):
            where = np.int64(first), np.int64(item), np.int64(0)
            call(code, (weight_kind, kind, product, *where))


def item_signature(weight_kind: Any, kind: Any) -> tuple[Any, ...]:
    """Signature of `multiply_item` for weights and rows of these types."""
    return weight_kind, kind, PRODUCT, int64, int64, int64


@inlined
def num_items(weight_kind: Any, num_rows: int, num_outputs: int) -> Any:
    """Items of a product for each ROWS_AT_ONCE rows."""
    return -(-num_panels(num_outputs) // tile_columns(weight_kind, num_rows, num_outputs))


@inlined
def num_panels(num_outputs: int) -> int:
    """Panels of LANES outputs."""
    return -(-num_outputs // LANES)


@inlined
def item_bytes(weight_kind: Any, product: Product) -> Any:
    """Bytes of weights of an item; items' weights are contiguous."""
    columns = tile_columns(weight_kind, product.num_rows, product.num_outputs)
    halves = 2 if product.is_gated else 1
    return halves * columns * product.steps * bytes_per_step(weight_kind)


@inlined
def are_narrow(weight_kind: Any) -> Any:
    """Whether weights are BFLOAT12."""
    return bytes_per_step(weight_kind) == bfloat12.STEP_BYTES


@inlined
def tile_rows(weight_kind: Any, columns: int, num_rows: int, left: int) -> Any:
    """Rows of the next tile if `left` of `num_rows` rows are left."""
    rows = TILE_ROWS
    if are_narrow(weight_kind):
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
def tile_columns(weight_kind: Any, num_rows: int, num_outputs: int) -> Any:
    # If memory bandwidth is the limit, one column reads the weights as one stream.
    is_stream = num_rows < (2 * _TALL_ROWS + 1 if are_narrow(weight_kind) else 4)
    is_stream &= bytes_per_step(weight_kind) >= bfloat12.STEP_BYTES
    return 1 if is_stream or num_panels(num_outputs) < TILE_COLUMNS else TILE_COLUMNS


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def multiply_item(
    weight_kind: Any, kind: Any, product: Product, first: int, item: int, ticket: int
) -> None:
    """Compute one of `num_items`: the outputs of a tile for ROWS_AT_ONCE rows from row `first`.
    ticket: see `may_store`, for few rows; 0: none.

    Tiles that would exceed the end begin earlier; results computed twice are identical.
    """
    columns = tile_columns(weight_kind, product.num_rows, product.num_outputs)
    panel = min(item * columns, num_panels(product.num_outputs) - columns)
    last = min(product.num_rows, first + ROWS_AT_ONCE)
    sums, levels = scratch(_SUMS_VECTORS), scratch(LEVELS_VECTORS)
    # 12-bit weights are decoded within the tile instead.
    is_small = bytes_per_step(weight_kind) < bfloat12.STEP_BYTES
    if is_small and product.num_rows >= MANY_ROWS:
        for part in range(product.num_parts):
            _multiply_dequantized(
                weight_kind, kind, product, part, panel, columns, first, last, sums, levels
            )
        return
    wanted = first
    while wanted < last:
        rows = tile_rows(weight_kind, columns, product.num_rows, last - wanted)
        row = min(wanted, product.num_rows - rows)
        # For few rows, all sums are complete before the first result is stored.
        at = sums + (row if ticket else 0) * SUMS_BYTES
        for part in range(product.num_parts):
            _sum_part(weight_kind, product, part, panel, columns, row, rows, at)
            if product.num_parts > 1:
                add_part(weight_kind, product, part, panel, columns, rows, at, levels)
        wanted = row + rows
        if not ticket:
            store_rows(weight_kind, kind, product, panel, columns, at, row, rows)
    if ticket and may_store(ticket):
        store_rows(weight_kind, kind, product, panel, columns, sums, 0, product.num_rows)


@njit(inline="always")
def _sum_part(
    weight_kind: Any,
    product: Product,
    part: int,
    panel: int,
    columns: int,
    row: int,
    rows: int,
    sums: int,
) -> None:
    """Compute the sums of a tile over one part of the inputs."""
    steps, step_bytes = product.steps // product.num_parts, bytes_per_step(weight_kind)
    row_bytes, panel_bytes = product.steps * STEP_BYTES, product.steps * step_bytes
    halves = 2 if product.is_gated else 1
    weights = product.weights + halves * panel * panel_bytes + part * steps * step_bytes
    source = product.inputs + row * row_bytes + part * steps * STEP_BYTES
    for half in range(halves):
        vectors = weights + half * columns * panel_bytes
        to = sums + half * columns * VECTOR_BYTES
        multiply_tile(
            weight_kind, rows, columns, vectors, panel_bytes, source, row_bytes, steps, to
        )
    if are_narrow(weight_kind):
        # Each part has its own exceptions.
        all_parts = halves * num_panels(product.num_outputs) * product.num_parts
        for column in range(halves * columns):
            own = (halves * panel + column) * product.num_parts + part, 1, all_parts
            to = sums + column * VECTOR_BYTES
            add_exceptions(product.beside, own, source, row_bytes, rows, (to, SUMS_BYTES))


@njit(inline="always")
def _multiply_dequantized(
    weight_kind: Any,
    kind: Any,
    product: Product,
    part: int,
    panel: int,
    columns: int,
    first: int,
    last: int,
    sums: int,
    levels: int,
) -> None:
    """`multiply_item` for many rows and one part: weights are dequantized once for all rows, some
    steps at a time. The last part stores the outputs."""
    halves, steps = 2 if product.is_gated else 1, product.steps // product.num_parts
    step_bytes = bytes_per_step(weight_kind)
    row_bytes, panel_bytes = product.steps * STEP_BYTES, product.steps * step_bytes
    weights = product.weights + halves * panel * panel_bytes + part * steps * step_bytes
    inputs, numbers = product.inputs + part * steps * STEP_BYTES, scratch(DEQUANTIZED_VECTORS)
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
                own = numbers + half * columns * count * VECTOR_BYTES
                add_dequantized(kind, columns, own, source, row_bytes, count, to)
            if begin + count == steps:
                if product.num_parts > 1:
                    own = levels + place
                    add_part(weight_kind, product, part, panel, columns, TILE_ROWS, at, own)
                if part == product.num_parts - 1:
                    store_rows(weight_kind, kind, product, panel, columns, at, row, TILE_ROWS)


@njit(inline="always")
def add_dequantized(
    kind: Any, columns: int, numbers: int, inputs: int, row_bytes: int, steps: int, sums: int
) -> None:
    """Add the products of rows and dequantized weights to the sums."""
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
        # Only 12-bit weights.
        outlined(_TILE_16_1, (kind, starts, *given))
    elif rows == 8:
        outlined(_TILE_8_1, (kind, starts, *given))
    elif rows == 4:
        outlined(_TILE_4_1, (kind, starts, *given))
    elif rows == 2:
        outlined(_TILE_2_1, (kind, starts, *given))
    else:
        outlined(_TILE_1_1, (kind, starts, *given))
