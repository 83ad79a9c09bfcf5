"""Products with weights of 4 bits: `linear` with a scale and a zero for each group of inputs."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numba import njit, prange, typeof, types
from numba.extending import overload
from torch import Tensor

from text_generation_shard.device.cpu.kernels import Place
from text_generation_shard.device.cpu.kernels.calls import address_of, call
from text_generation_shard.device.cpu.kernels.grouped import (
    BLOCK_BYTES,
    GROUP,
    PLACES,
    STEPS,
    VECTORS,
    grouped_tile,
    sum_group,
)
from text_generation_shard.device.cpu.kernels.linear import (
    item_bytes,
    item_signature,
    num_items,
)
from text_generation_shard.device.cpu.kernels.llvm import LANES, VECTOR_BYTES
from text_generation_shard.device.cpu.kernels.product import (
    ROWS_AT_ONCE,
    SUMS_BYTES,
    SUMS_WIDTH,
    TILE_ROWS,
    Product,
    put_rows,
)
from text_generation_shard.device.cpu.kernels.team import may_put
from text_generation_shard.device.cpu.kernels.vector import (
    BFLOAT16,
    INT4,
    STEP_BYTES,
    aligned,
    array_at,
    rounded,
    scratch,
)

# Rows whose groups are summed by all threads.
_SHARED_ROWS: Final = 8
# Rows of a tile if there are so many; else 8, 4, 2 or 1.
_MANY_ROWS: Final = 12
# Panels of an item of few rows, and bytes of weights that are enough for one.
_MOST_PANELS: Final = 4
_ITEM_BYTES: Final = 20 * 1024
_SUMS_VECTORS: Final = max(_MANY_ROWS, _MOST_PANELS * TILE_ROWS) * SUMS_WIDTH


class GroupedWeight:
    """Owns a weight [N, K] of 4 bits in packed form: w = scale * number + zero, by group."""

    def __init__(
        self, numbers: Tensor, scale: Tensor, zero: Tensor, is_gated: bool = False
    ) -> None:
        """numbers [N, K] from 0 to 15, int8, which stand for -8 to 7; scale and zero [N, K / 32]
        bfloat16; N a multiple of 16, K of 32.

        `is_gated`: see GatedWeight; N is a multiple of 32, and half as many come out."""
        outputs, inputs = numbers.shape
        panels, groups = outputs // LANES, inputs // GROUP
        if is_gated:
            numbers, scale, zero = (
                part.view(2, -1, LANES, part.shape[1]).transpose(0, 1).flatten(0, 2)
                for part in (numbers, scale, zero)
            )
        # Behind an odd number of groups, one more of zeros; of its numbers nothing is kept.
        pairs, extra = -(-groups // 2), -groups % 2
        self._packed = aligned(panels * panel_bytes.py_func(groups), torch.uint8)
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
        places = numbers.view(panels, LANES, groups, VECTORS, PLACES, 2)
        shifts = 4 * torch.arange(PLACES, dtype=torch.int32)[:, None]
        words = (places.int() << shifts).sum(dim=-2).permute(0, 2, 3, 1, 4).flatten(3)
        words = torch.nn.functional.pad(words, (0, 0, 0, 0, 0, extra))
        blocks[:, :, 2:] = words.view(panels, pairs, 2 * VECTORS, 2 * LANES)
        packed = self._packed.view(torch.int16).view(panels, -1)
        packed.copy_(rows[:, : packed.shape[1]])
        kinds = typeof(INT4), typeof(BFLOAT16)
        self._code = address_of(multiply_grouped_item, item_signature(*kinds))
        self._size = outputs // 2 if is_gated else outputs, inputs
        self._is_gated = is_gated
        self.nbytes = self._packed.nbytes

    @property
    def place(self) -> Place:
        """For `kernels.layers`."""
        return Place(INT4, self._packed.data_ptr(), 0, self._packed.nbytes)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, K] bfloat16, contiguous → [T, N]."""
        outputs, inputs = self._size
        out = torch.empty((hidden.shape[0], outputs), dtype=torch.bfloat16)
        groups = inputs // GROUP
        input_sums = torch.empty(hidden.shape[0] * sums_bytes.py_func(groups), dtype=torch.uint8)
        product = Product(
            weights=self._packed.data_ptr(),
            beside=input_sums.data_ptr(),
            inputs=hidden.data_ptr(),
            out=out.data_ptr(),
            num_rows=hidden.shape[0],
            steps=groups * STEPS,
            num_outputs=outputs,
            is_gated=self._is_gated,
        )
        multiply_grouped(self._code, product)
        return out


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def sum_groups(inputs: int, input_sums: int, row: int, groups: int) -> None:
    """The sums of a row's groups as bfloat16, in pairs, for `multiply_grouped_item`."""
    width = groups + groups % 2
    sums = array_at(BFLOAT16, input_sums + row * width * 2)
    sums[width - 1] = BFLOAT16
    for group in range(groups):
        total = sum_group(inputs + (row * groups + group) * STEPS * STEP_BYTES)
        sums[group] = rounded(BFLOAT16, total)


@njit(parallel=True, nogil=True, cache=True, boundscheck=False, error_model="numpy")
def multiply_grouped(code: int, product: Product) -> None:
    """`multiply` for numbers of 4 bits with bfloat16 rows, whose sums of groups it writes; code:
    where `multiply_grouped_item` lies."""
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
    groups, tile_rows = product.steps // STEPS, _tile_rows(num_rows)
    halves, sums = 2 if product.is_gated else 1, scratch(_SUMS_VECTORS)
    span = _panels_of_item(product)
    panels = range(item * span, min((item + 1) * span, product.num_outputs // LANES))
    for panel in panels:
        for wanted in range(first, min(num_rows, first + ROWS_AT_ONCE), tile_rows):
            row = min(wanted, num_rows - tile_rows)
            source = (
                product.inputs + row * row_bytes,
                row_bytes,
                product.beside + row * sums_bytes(groups),
                sums_bytes(groups),
            )
            # Of few rows all sums are there before the first result is put.
            at = sums
            if ticket:
                at += ((panel - panels.start) * TILE_ROWS + row) * SUMS_BYTES
            for half in range(halves):
                blocks = product.weights + (halves * panel + half) * panel_bytes(groups)
                _multiply_tile(tile_rows, blocks, source, groups, at + half * VECTOR_BYTES)
            if not ticket:
                put_rows(BFLOAT16, BFLOAT16, product, panel, 1, at, row, tile_rows)
    if ticket and may_put(ticket):
        for panel in panels:
            at = sums + (panel - panels.start) * TILE_ROWS * SUMS_BYTES
            put_rows(BFLOAT16, BFLOAT16, product, panel, 1, at, 0, num_rows)


@njit(inline="always")
def _num_items(product: Product) -> Any:
    return -(-(product.num_outputs // LANES) // _panels_of_item(product))


@njit(inline="always")
def _panels_of_item(product: Product) -> Any:
    # To take an item takes as long as to read a kilobyte.
    size = (2 if product.is_gated else 1) * panel_bytes(product.steps // STEPS)
    return max(1, min(_MOST_PANELS, _ITEM_BYTES // size)) if product.num_rows <= TILE_ROWS else 1


@njit(inline="always")
def _tile_rows(num_rows: int) -> int:
    # More rows to a tile take a sixteenth less, but some may be computed twice.
    are_many = num_rows >= _MANY_ROWS and (
        -num_rows % _MANY_ROWS <= -num_rows % TILE_ROWS + num_rows // 16
    )
    rows = min(num_rows, TILE_ROWS)
    while rows & (rows - 1):
        rows &= rows - 1
    return _MANY_ROWS if are_many else rows


@njit(inline="always")
def sums_bytes(groups: int) -> int:
    """What the sums of a row's groups take."""
    return -(-groups // 2) * STEP_BYTES


@njit(inline="always")
def panel_bytes(groups: int) -> int:
    """What a panel of so many groups takes."""
    return groups // 2 * BLOCK_BYTES + groups % 2 * (BLOCK_BYTES - VECTORS * VECTOR_BYTES)


@njit(inline="always")
def _multiply_tile(rows: int, blocks: int, source: Any, groups: int, sums: int) -> None:
    if rows == 12:
        grouped_tile(12, blocks, source, groups, sums, SUMS_BYTES)
    elif rows == 8:
        grouped_tile(8, blocks, source, groups, sums, SUMS_BYTES)
    elif rows == 4:
        grouped_tile(4, blocks, source, groups, sums, SUMS_BYTES)
    elif rows == 2:
        grouped_tile(2, blocks, source, groups, sums, SUMS_BYTES)
    else:
        grouped_tile(1, blocks, source, groups, sums, SUMS_BYTES)


# A name for compiled code: numba puts what `overload` returns in its place.
def cost_of_items(weight_kind: Any, product: Product) -> tuple[int, int]:
    """How many items a product of ROWS_AT_ONCE rows at most has, and of how many bytes of weights,
    which lie one behind the other. For compiled code."""
    raise NotImplementedError


@overload(cost_of_items)
def _choose_cost(weight_kind: Any, product: Any) -> Callable[..., tuple[int, int]]:
    def of_grouped(weight_kind: Any, product: Any) -> tuple[int, int]:
        size = _panels_of_item(product) * panel_bytes(product.steps // STEPS)
        return _num_items(product), (2 if product.is_gated else 1) * size

    def of_others(weight_kind: Any, product: Any) -> tuple[int, int]:
        items = num_items(weight_kind, product.num_rows, product.num_outputs)
        return items, item_bytes(weight_kind, product)

    return of_grouped if weight_kind == types.uint8 else of_others
