"""Products with weights of 4 bits: `linear` with a scale and a zero for each group of inputs."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numba import njit, prange, types
from numba.extending import overload
from torch import Tensor

from text_generation_shard.kernels import Place
from text_generation_shard.kernels.calls import call
from text_generation_shard.kernels.grouped import (
    BLOCK_BYTES,
    GROUP,
    PLACES,
    STEPS,
    VECTORS,
    grouped_tile,
)
from text_generation_shard.kernels.linear import aligned
from text_generation_shard.kernels.llvm import LANES, VECTOR_BYTES
from text_generation_shard.kernels.pointwise import exponential
from text_generation_shard.kernels.vector import (
    BFLOAT16,
    FLOAT32,
    INT4,
    STEP_BYTES,
    array_at,
    rounded,
    scratch,
    widened,
)

_ROWS_AT_ONCE: Final = 256
_TILE_ROWS: Final = 8
_TILE_COLUMNS: Final = 3
_TILE_WIDTH: Final = _TILE_COLUMNS * LANES
_TILE_VECTORS: Final = _TILE_ROWS * _TILE_COLUMNS
# Rows whose groups are summed by all threads.
_MANY_ROWS: Final = 8


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
        self._packed = aligned(panels * groups * BLOCK_BYTES, torch.uint8)
        blocks = self._packed.view(torch.int16).view(panels, groups, VECTORS, LANES, 2)
        places = numbers.view(panels, LANES, groups, VECTORS - 1, PLACES, 2)
        shifts = 4 * torch.arange(PLACES, dtype=torch.int32)[:, None]
        words = (places.int() << shifts).sum(dim=-2)
        blocks[:, :, :-1] = words.permute(0, 2, 3, 1, 4)
        factors = torch.stack((scale, zero), dim=-1).view(panels, LANES, groups, 2)
        blocks[:, :, -1] = factors.transpose(1, 2).view(torch.int16)
        self._size = outputs // 2 if is_gated else outputs, inputs
        self._is_gated = is_gated
        self.nbytes = self._packed.nbytes

    @property
    def place(self) -> Place:
        """For `kernels.layers`."""
        return Place(INT4, self._packed.data_ptr(), 0)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, K] bfloat16, contiguous → [T, N]."""
        outputs, inputs = self._size
        out = torch.empty((hidden.shape[0], outputs), dtype=torch.bfloat16)
        multiply_grouped(
            self._packed.data_ptr(),
            hidden.data_ptr(),
            out.data_ptr(),
            hidden.shape[0],
            inputs // GROUP,
            outputs,
            self._is_gated,
        )
        return out


@njit(fastmath={"reassoc", "nsz"})
def _sum_groups(inputs: int, input_sums: int, row: int, groups: int) -> None:
    numbers, sums = array_at(BFLOAT16, inputs), array_at(FLOAT32, input_sums)
    for group in range(row * groups, (row + 1) * groups):
        total = FLOAT32
        for place in range(GROUP):
            total += widened(BFLOAT16, numbers[group * GROUP + place])
        sums[group] = total


@njit(parallel=True, nogil=True, cache=True, boundscheck=False, error_model="numpy")
def multiply_grouped(
    weights: int,
    inputs: int,
    out: int,
    num_rows: int,
    groups: int,
    num_outputs: int,
    is_gated: bool,
) -> None:
    """`multiply`, or `multiply_gated`, for numbers of 4 bits with bfloat16 rows."""
    input_sums = np.empty(num_rows * groups, np.float32)
    if num_rows < _MANY_ROWS:
        for row in range(num_rows):
            _sum_groups(inputs, input_sums.ctypes.data, row, groups)
    else:
        for row in prange(num_rows):
            _sum_groups(inputs, input_sums.ctypes.data, row, groups)
    num_panels = num_outputs // LANES
    tile_rows = min(num_rows, _TILE_ROWS)
    while tile_rows & (tile_rows - 1):
        tile_rows &= tile_rows - 1
    # Of few rows memory is the limit: one panel after another is one stream from front to back.
    is_stream = is_gated or tile_rows <= 2 or num_panels < _TILE_COLUMNS
    columns = 1 if is_stream else _TILE_COLUMNS
    halves, panel_bytes = 2 if is_gated else 1, groups * BLOCK_BYTES
    row_bytes, sums_bytes = groups * STEPS * STEP_BYTES, groups * 4
    target = array_at(BFLOAT16, out)
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        last = min(num_rows, first + _ROWS_AT_ONCE)
        for place in prange(-(-num_panels // columns)):
            sums = scratch(_TILE_VECTORS)
            results = array_at(FLOAT32, sums)
            panel = min(place * columns, num_panels - columns)
            for wanted in range(first, last, tile_rows):
                row = min(wanted, num_rows - tile_rows)
                for half in range(halves):
                    _multiply_tile(
                        tile_rows,
                        columns,
                        weights + (halves * panel + half) * panel_bytes,
                        panel_bytes,
                        inputs + row * row_bytes,
                        row_bytes,
                        input_sums.ctypes.data + row * sums_bytes,
                        sums_bytes,
                        groups,
                        sums + half * VECTOR_BYTES,
                    )
                for place_in_tile in range(tile_rows):
                    begin = (row + place_in_tile) * num_outputs + panel * LANES
                    at = place_in_tile * _TILE_WIDTH
                    if is_gated:
                        for lane in range(LANES):
                            gate, up = results[at + lane], results[at + LANES + lane]
                            silu = gate / (np.float32(1.0) + exponential(-gate))
                            target[begin + lane] = rounded(BFLOAT16, silu * up)
                    else:
                        for column in range(columns * LANES):
                            target[begin + column] = rounded(BFLOAT16, results[at + column])


@njit(inline="always")
def _multiply_tile(
    rows: int,
    columns: int,
    at: int,
    panel: int,
    inputs: int,
    row: int,
    input_sums: int,
    stride: int,
    groups: int,
    sums: int,
) -> None:
    width = _TILE_WIDTH * 4
    one, three = (at,), (at, at + panel, at + 2 * panel)
    if columns == 3:
        if rows == 8:
            grouped_tile(8, 3, three, inputs, row, input_sums, stride, groups, sums, width)
        else:
            grouped_tile(4, 3, three, inputs, row, input_sums, stride, groups, sums, width)
    elif rows == 8:
        grouped_tile(8, 1, one, inputs, row, input_sums, stride, groups, sums, width)
    elif rows == 4:
        grouped_tile(4, 1, one, inputs, row, input_sums, stride, groups, sums, width)
    elif rows == 2:
        grouped_tile(2, 1, one, inputs, row, input_sums, stride, groups, sums, width)
    else:
        grouped_tile(1, 1, one, inputs, row, input_sums, stride, groups, sums, width)


# A name for compiled code: numba puts what `overload` returns in its place.
def call_product(
    weight_kind: Any,
    kind: Any,
    code: int,
    weights: int,
    scales: int,
    inputs: int,
    out: int,
    num_rows: int,
    steps: int,
    num_outputs: int,
    is_gated: bool,
) -> None:
    """Run `multiply` or `multiply_gated`, or `multiply_grouped` if the weights are INT4: what
    fits them lies at `code`. For compiled code."""
    raise NotImplementedError


@overload(call_product)
def _choose_call(
    weight_kind: Any,
    kind: Any,
    code: int,
    weights: int,
    scales: int,
    inputs: int,
    out: int,
    num_rows: int,
    steps: int,
    num_outputs: int,
    is_gated: bool,
) -> Callable[..., None]:
    def call_grouped(
        weight_kind: Any,
        kind: Any,
        code: int,
        weights: int,
        scales: int,
        inputs: int,
        out: int,
        num_rows: int,
        steps: int,
        num_outputs: int,
        is_gated: bool,
    ) -> None:
        call(code, (weights, inputs, out, num_rows, steps // STEPS, num_outputs, is_gated))

    def call_other(
        weight_kind: Any,
        kind: Any,
        code: int,
        weights: int,
        scales: int,
        inputs: int,
        out: int,
        num_rows: int,
        steps: int,
        num_outputs: int,
        is_gated: bool,
    ) -> None:
        where = weights, scales, inputs, out, num_rows, steps, num_outputs
        call(code, (weight_kind, kind, *where))

    return call_grouped if weight_kind == types.uint8 else call_other
