"""Products with weights of 4 bits: `linear` with a scale and a zero for each group of inputs."""

from typing import Final

import torch
from numba import njit, prange
from torch import Tensor

from text_generation_shard.kernels.grouped import GROUP, grouped_tile
from text_generation_shard.kernels.linear import aligned, pack
from text_generation_shard.kernels.llvm import LANES, VECTOR_BYTES
from text_generation_shard.kernels.vector import (
    BFLOAT16,
    FLOAT32,
    array_at,
    rounded,
    scratch,
    widened,
)

_ROWS_AT_ONCE: Final = 256
# Two sums for each of the tile: of a group, and of all groups.
_TILE_ROWS: Final = 4
_TILE_COLUMNS: Final = 3
_TILE_WIDTH: Final = _TILE_COLUMNS * LANES
_TILE_VECTORS: Final = _TILE_ROWS * _TILE_COLUMNS
# Rows whose groups are summed by all threads.
_MANY_ROWS: Final = 8


class GroupedWeight:
    """Owns a weight [N, K] of 4 bits in packed form: w = scale * number + zero, by group."""

    def __init__(self, numbers: Tensor, scale: Tensor, zero: Tensor) -> None:
        """numbers [N, K] from 0 to 15, int8, which stand for -8 to 7; scale and zero [N, K / 32]
        bfloat16; N a multiple of 16, K of 32."""
        outputs, inputs = numbers.shape
        panels = outputs // LANES
        pairs = pack(numbers)
        self._packed = aligned(panels * inputs * LANES // 2, torch.uint8)
        self._packed.view(panels, -1, LANES).copy_(pairs[..., 0] | pairs[..., 1] << 4)
        # [panels, groups, 2, 16]
        both = torch.stack((scale, zero)).view(2, panels, LANES, -1)
        self._scales = aligned(both.numel(), torch.bfloat16)
        self._scales.view(panels, -1, 2, LANES).copy_(both.permute(1, 3, 0, 2))
        self._size = outputs, inputs
        self.nbytes = self._packed.nbytes + self._scales.nbytes

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, K] bfloat16, contiguous → [T, N]."""
        outputs, inputs = self._size
        out = torch.empty((hidden.shape[0], outputs), dtype=torch.bfloat16)
        sums = torch.empty((hidden.shape[0], inputs // GROUP), dtype=torch.float32)
        multiply_grouped(
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            hidden.data_ptr(),
            sums.data_ptr(),
            out.data_ptr(),
            hidden.shape[0],
            inputs // GROUP,
            outputs,
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
    scales: int,
    inputs: int,
    input_sums: int,
    out: int,
    num_rows: int,
    groups: int,
    num_outputs: int,
) -> None:
    """`multiply` for numbers of 4 bits with bfloat16 rows; input_sums: room for [T, groups]."""
    if num_rows < _MANY_ROWS:
        for row in range(num_rows):
            _sum_groups(inputs, input_sums, row, groups)
    else:
        for row in prange(num_rows):
            _sum_groups(inputs, input_sums, row, groups)
    num_panels = num_outputs // LANES
    tile_rows = _TILE_ROWS if num_rows >= _TILE_ROWS else 1
    columns = _TILE_COLUMNS if num_panels >= _TILE_COLUMNS else 1
    panel_bytes, scale_bytes = groups * GROUP * LANES // 2, groups * VECTOR_BYTES
    row_bytes, sums_bytes = groups * GROUP * 2, groups * 4
    target = array_at(BFLOAT16, out)
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        last = min(num_rows, first + _ROWS_AT_ONCE)
        for place in prange(-(-num_panels // columns)):
            sums = scratch(_TILE_VECTORS)
            results = array_at(FLOAT32, sums)
            panel = min(place * columns, num_panels - columns)
            start = panel * LANES
            for wanted in range(first, last, tile_rows):
                row = min(wanted, num_rows - tile_rows)
                _multiply_tile(
                    tile_rows,
                    columns,
                    weights + panel * panel_bytes,
                    panel_bytes,
                    scales + panel * scale_bytes,
                    scale_bytes,
                    inputs + row * row_bytes,
                    row_bytes,
                    input_sums + row * sums_bytes,
                    sums_bytes,
                    groups,
                    sums,
                )
                for place_in_tile in range(tile_rows):
                    begin = (row + place_in_tile) * num_outputs + start
                    for column in range(columns * LANES):
                        value = results[place_in_tile * _TILE_WIDTH + column]
                        target[begin + column] = rounded(BFLOAT16, value)


@njit(inline="always")
def _multiply_tile(
    rows: int,
    columns: int,
    at: int,
    panel: int,
    scale: int,
    step: int,
    inputs: int,
    row: int,
    input_sums: int,
    stride: int,
    groups: int,
    sums: int,
) -> None:
    width = _TILE_WIDTH * 4
    one, ones = (at,), (scale,)
    three, scales = (at, at + panel, at + 2 * panel), (scale, scale + step, scale + 2 * step)
    if columns == 3 and rows == 4:
        grouped_tile(4, 3, three, scales, inputs, row, input_sums, stride, groups, sums, width)
    elif columns == 3:
        grouped_tile(1, 3, three, scales, inputs, row, input_sums, stride, groups, sums, width)
    elif rows == 4:
        grouped_tile(4, 1, one, ones, inputs, row, input_sums, stride, groups, sums, width)
    else:
        grouped_tile(1, 1, one, ones, inputs, row, input_sums, stride, groups, sums, width)
