"""Weights in the forms that a GPU multiplies.

Every quantized form has `obstacle_of(weight)`: why it can not store a weight (empty: it can). Its
constructor takes (weight, dtype of the activations, whether one tile serves every number of rows).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from text_generation_shard.device.base import ALL
from text_generation_shard.device.cuda.kernels import launch, layers
from text_generation_shard.device.reference.matrices import (
    GROUP,
    FloatMatrix,
    Int8Table,
    dtype_name,
    parts_of,
    quantize_groups,
    quantize_rows,
    quantize_rows_float8,
)

# Most values quantized at once: bounds the float32 copies, and is enough to occupy a GPU.
_FITTED_NUMBERS = 2**22
# torch's fp8 product needs aligned rows.
_STEP = 16
INT4_BLOCK = 128
"""Inputs per block of an int4 weight, and so the `inputs` of its tiles."""


class ProductTile(NamedTuple):
    """How `layers.multiply` tiles rows, outputs and inputs."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


# Tiles by bits per weight: static, so that no start tunes anything; the same for all GPUs, and not
# measured. `_FEW` serves as many rows as its tile has, `_SOME` up to 256 rows, and any number of
# rows if one tile must serve all.
# Float32 has one tile of 32 outputs: with 64, Triton 3.7 uses the tensor cores of compute
# capability 10.0, which drop bits.
_FEW = {8: ProductTile(16, 32, 256, 4, 4), 4: ProductTile(16, 32, INT4_BLOCK, 4, 6)}
_SOME = {
    16: ProductTile(64, 64, 64, 4, 5),
    8: ProductTile(64, 64, 64, 4, 5),
    4: ProductTile(64, 64, INT4_BLOCK, 4, 4),
}
_MOST_OF_SOME = 256
_MANY = {8: ProductTile(128, 128, 64, 8, 3), 4: ProductTile(128, 128, INT4_BLOCK, 8, 3)}
_FLOAT32 = {
    32: ProductTile(64, 32, 16, 4, 3),
    8: ProductTile(64, 32, 32, 4, 3),
    4: ProductTile(64, 32, INT4_BLOCK, 4, 2),
}


def _product_tile(bits: int, is_float32: bool, num_rows: int | None) -> ProductTile:
    """bits: per weight; is_float32: hidden states are float32. num_rows None: the one tile for
    every number of rows."""
    if is_float32:
        return _FLOAT32[bits]
    if num_rows is None:
        return _SOME[bits]
    if num_rows <= _FEW[bits].rows:
        return _FEW[bits]
    return _SOME[bits] if num_rows <= _MOST_OF_SOME else _MANY[bits]


class Product:
    """A weight [num_outputs, K] as `layers.multiply` reads it: see `Matrix`."""

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor | None,
        num_outputs: int,
        bits: int,
        has_one_tile: bool,
    ) -> None:
        """weight, scales: see `layers.multiply`; `bits` per weight. has_one_tile: one tile serves
        every number of rows, so that a row's result does not depend on the others."""
        self._weight, self._weight_scales = weight, scales
        self._num_outputs, self._bits, self._has_one_tile = num_outputs, bits, has_one_tile
        self.nbytes = weight.nbytes + (0 if scales is None else scales.nbytes)

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Matrix."""
        hidden = hidden.contiguous()
        num_rows, num_inputs = hidden.shape
        out = hidden.new_empty(num_rows, self._num_outputs)
        is_float32 = hidden.dtype == torch.float32
        tile = _product_tile(self._bits, is_float32, None if self._has_one_tile else num_rows)
        launch(
            layers.multiply,
            (-(-num_rows // tile.rows), -(-self._num_outputs // tile.outputs)),
            (hidden, self._weight, self._weight_scales, bias, out, num_rows),
            NUM_INPUTS=num_inputs,
            NUM_OUTPUTS=self._num_outputs,
            IS_GROUPED=self._bits == 4,
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            INPUTS=tile.inputs,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return out


class OneTileMatrix(Product, FloatMatrix):
    """A float weight whose product with a row is bit for bit independent of the number of rows,
    which torch's operators do not guarantee."""

    def __init__(self, weight: Tensor) -> None:
        bits, self.kind = 8 * weight.dtype.itemsize, dtype_name(weight.dtype)
        super().__init__(weight.contiguous(), None, len(weight), bits, has_one_tile=True)


class Int8Matrix(Product, Int8Table):
    """A weight quantized by `quantize_rows`: see `Int8Table`."""

    def __init__(
        self, weight: Tensor, dtype: torch.dtype, has_one_tile: bool, columns: slice = ALL
    ) -> None:
        """columns: see Device.matrix."""
        shape, self._dtype = weight[:, columns].shape, dtype
        self._numbers = weight.new_empty(shape, dtype=torch.int8)
        self._scales = weight.new_empty(len(weight), dtype=dtype)
        for own, part in _slices_of(weight):
            self._numbers[own], self._scales[own] = quantize_rows(part, dtype, columns)
        super().__init__(self._numbers, self._scales, len(weight), 8, has_one_tile)


class Int4Matrix(Product):
    """A weight quantized by `quantize_groups`: see `Matrix`."""

    kind = "int4"

    def __init__(
        self, weight: Tensor, dtype: torch.dtype, has_one_tile: bool, columns: slice = ALL
    ) -> None:
        """columns: see Device.matrix."""
        weight = weight[:, columns].contiguous()
        num_outputs, num_inputs = weight.shape
        num_blocks, half = -(-num_inputs // INT4_BLOCK), INT4_BLOCK // 2
        packed = weight.new_empty(num_outputs, num_blocks, half, dtype=torch.uint8)
        shape = num_outputs, num_blocks, half // GROUP, 2, 2
        scales = weight.new_empty(shape, dtype=dtype)
        for own, part in _slices_of(weight):
            packed[own], scales[own] = _packed(*quantize_groups(part, dtype))
        super().__init__(packed, scales, num_outputs, 4, has_one_tile)

    @staticmethod
    def obstacle_of(weight: Tensor) -> str:
        """Why the weight can not be int4; empty when it can."""
        if weight.shape[1] % GROUP:
            return f"{weight.shape[1]} inputs are not a multiple of {GROUP}"
        return ""


def _slices_of(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The parts of a weight to quantize, with their outputs."""
    first = 0
    for part in parts_of(weight, _FITTED_NUMBERS):
        yield slice(first, first + len(part)), part
        first += len(part)


def _packed(numbers: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """The result of `quantize_groups` in the layout of `layers.multiply`."""
    num_outputs, num_inputs = numbers.shape
    half = INT4_BLOCK // 2
    fill = -num_inputs % INT4_BLOCK
    low, high = F.pad(numbers, (0, fill)).view(num_outputs, -1, 2, half).unbind(2)
    both = F.pad(torch.stack((scales, zeros), dim=-1), (0, 0, 0, fill // GROUP))
    # Groups of both halves side by side.
    both = both.view(num_outputs, -1, 2, half // GROUP, 2).transpose(2, 3)
    return (low | high << 4).to(torch.uint8), both


class Float8Matrix:
    """A weight quantized by `quantize_rows_float8`; activations are quantized in the same way, row
    by row. See `Matrix`. torch computes the product in bfloat16, the output dtype that it supports
    on every GPU with fp8."""

    kind = "fp8"

    def __init__(
        self, weight: Tensor, dtype: torch.dtype, has_one_tile: bool, columns: slice = ALL
    ) -> None:
        """columns: see Device.matrix."""
        assert not has_one_tile, "torch chooses its tiles by the number of rows"
        shape = weight[:, columns].shape
        self._numbers = weight.new_empty(shape, dtype=torch.float8_e4m3fn)
        # [1, N]: one scale per column of the right operand.
        self._scales = weight.new_empty(1, len(weight), dtype=torch.float32)
        for own, part in _slices_of(weight):
            self._numbers[own], self._scales[0, own] = quantize_rows_float8(part, columns)
        self.nbytes = self._numbers.nbytes + self._scales.nbytes

    @staticmethod
    def obstacle_of(weight: Tensor) -> str:
        """Why the weight can not be fp8; empty when it can."""
        for count, what in zip(weight.shape, ("outputs", "inputs"), strict=True):
            if count % _STEP:
                return f"{count} {what} are not a multiple of {_STEP}"
        return ""

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Matrix."""
        numbers, scales = quantized_float8(hidden.contiguous())
        out: Tensor = torch._scaled_mm(
            numbers,
            self._numbers.t(),
            scale_a=scales,
            scale_b=self._scales,
            bias=None if bias is None else bias.bfloat16(),
            out_dtype=torch.bfloat16,
            # Sums stay in tensor cores, with fewer bits than float32.
            use_fast_accum=True,
        )
        return out.to(hidden.dtype)


def quantized_float8(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize hidden [T, K] to float8_e4m3fn values [T, K] and float32 scales [T, 1]."""
    num_rows, size = hidden.shape
    numbers = torch.empty_like(hidden, dtype=torch.float8_e4m3fn)
    scales = hidden.new_empty(num_rows, 1, dtype=torch.float32)
    launch(
        layers.quantize_rows,
        (num_rows,),
        (hidden, numbers, scales),
        SIZE=size,
        SIZE_PAD=triton.next_power_of_2(size),
        num_warps=8 if size >= 4096 else 4,
    )
    return numbers, scales


FORMS: dict[str | None, tuple[type[Int8Matrix | Int4Matrix | Float8Matrix], ...]] = {
    None: (),
    "int8": (Int8Matrix,),
    "int4": (Int4Matrix, Int8Matrix),
    "fp8": (Float8Matrix,),
}
"""The forms that are tried, in this order, for each value of --quantize. If none fits, the weight
stays float."""
