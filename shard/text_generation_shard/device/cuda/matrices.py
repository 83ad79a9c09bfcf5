"""Weights in the forms that a GPU multiplies.

Every quantized form has `obstacle_of(weight)`: why it can not store a weight (empty: it can). Its
constructor takes (weight, dtype of the activations, whether one tile serves every number of rows).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from text_generation_shard.device.base import ALL, Matrix
from text_generation_shard.device.cuda.kernels import launch, pointwise, product, tiles
from text_generation_shard.device.reference.linear import FloatMatrix
from text_generation_shard.device.reference.quantized import (
    GROUP,
    parts_of,
    quantize_groups,
    quantize_rows,
    quantize_rows_float8,
)

# Most values quantized at once: bounds the float32 copies, and is enough to occupy a GPU.
_FITTED_NUMBERS = 2**22
# Input rows are aligned for the widest loads; torch's fp8 product requires it too.
_STEP = 16


@dataclass(frozen=True, slots=True)
class Product:
    """A weight [num_outputs, K] as `product.multiply` reads it."""

    # See `product.multiply`; `bits` per weight.
    weight: Tensor
    scales: Tensor | None
    num_outputs: int
    bits: int
    # One tile serves every number of rows, so that a row's result does not depend on the others.
    has_one_tile: bool

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def __call__(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """hidden [T, K] → [T, num_outputs], plus bias [num_outputs]."""
        hidden = hidden.contiguous()
        num_rows, num_inputs = hidden.shape
        out = hidden.new_empty(num_rows, self.num_outputs)
        is_float32 = hidden.dtype == torch.float32
        tile = tiles.product_tile(self.bits, is_float32, None if self.has_one_tile else num_rows)
        launch(
            product.multiply,
            (-(-num_rows // tile.rows), -(-self.num_outputs // tile.outputs)),
            *(hidden, self.weight, self.scales, bias, out, num_rows),
            NUM_INPUTS=num_inputs,
            NUM_OUTPUTS=self.num_outputs,
            IS_GROUPED=self.bits == 4,
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            INPUTS=tile.inputs,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return out


class OneTileMatrix(FloatMatrix):
    """A float weight whose product with a row is bit for bit independent of the number of rows,
    which torch's operators do not guarantee."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.contiguous())
        bits = 8 * weight.dtype.itemsize
        self._product = Product(self._weight, None, len(weight), bits, has_one_tile=True)

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Matrix."""
        return self._product(hidden, bias)


class Int8Matrix:
    """A weight quantized by `quantize_rows`: see `Matrix` and `EmbeddingTable`."""

    kind = "int8"

    def __init__(
        self,
        weight: Tensor,
        dtype: torch.dtype,
        has_one_tile: bool,
        columns: slice = ALL,
    ) -> None:
        """columns: see Device.matrix."""
        shape = weight[:, columns].shape
        self._numbers = weight.new_empty(shape, dtype=torch.int8)
        self._scales, first = weight.new_empty(len(weight), dtype=dtype), 0
        for part in parts_of(weight, _FITTED_NUMBERS):
            own = slice(first, first + len(part))
            self._numbers[own], self._scales[own] = quantize_rows(part, dtype, columns)
            first = own.stop
        self._product = Product(self._numbers, self._scales, len(weight), 8, has_one_tile)
        self.nbytes = self._product.nbytes

    @staticmethod
    def obstacle_of(weight: Tensor) -> str:
        """Why the weight can not be int8; empty when it can."""
        if weight.shape[1] % _STEP:
            return f"{weight.shape[1]} inputs are not a multiple of {_STEP}"
        return ""

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Matrix."""
        return self._product(hidden, bias)

    def lookup(self, ids: Tensor) -> Tensor:
        """See EmbeddingTable."""
        rows = self._numbers.index_select(0, ids).to(self._scales.dtype)
        return rows.mul_(self._scales.index_select(0, ids)[:, None])

    def as_matrix(self) -> tuple[Matrix, int]:
        """See EmbeddingTable."""
        return self, 0


class Int4Matrix:
    """A weight quantized by `quantize_groups`: see `Matrix`."""

    kind = "int4"

    def __init__(self, weight: Tensor, dtype: torch.dtype, has_one_tile: bool) -> None:
        num_outputs, num_inputs = weight.shape
        num_blocks, half = -(-num_inputs // tiles.INT4_BLOCK), tiles.INT4_BLOCK // 2
        self._packed = weight.new_empty(num_outputs, num_blocks, half, dtype=torch.uint8)
        shape = num_outputs, num_blocks, half // GROUP, 2, 2
        self._scales, first = weight.new_empty(shape, dtype=dtype), 0
        for part in parts_of(weight, _FITTED_NUMBERS):
            own = slice(first, first + len(part))
            self._packed[own], self._scales[own] = _packed(*quantize_groups(part, dtype))
            first = own.stop
        self._product = Product(self._packed, self._scales, num_outputs, 4, has_one_tile)
        self.nbytes = self._product.nbytes

    @staticmethod
    def obstacle_of(weight: Tensor) -> str:
        """Why the weight can not be int4; empty when it can."""
        if weight.shape[1] % GROUP:
            return f"{weight.shape[1]} inputs are not a multiple of {GROUP}"
        return ""

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Matrix."""
        return self._product(hidden, bias)


def _packed(numbers: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """The result of `quantize_groups` in the layout of `product.multiply`."""
    num_outputs, num_inputs = numbers.shape
    half = tiles.INT4_BLOCK // 2
    fill = -num_inputs % tiles.INT4_BLOCK
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
        self,
        weight: Tensor,
        dtype: torch.dtype,
        has_one_tile: bool,
        columns: slice = ALL,
    ) -> None:
        """columns: see Device.matrix."""
        assert not has_one_tile, "torch chooses its tiles by the number of rows"
        shape = weight[:, columns].shape
        self._numbers = weight.new_empty(shape, dtype=torch.float8_e4m3fn)
        # [1, N]: one scale per column of the right operand.
        self._scales, first = weight.new_empty(1, len(weight), dtype=torch.float32), 0
        for part in parts_of(weight, _FITTED_NUMBERS):
            own = slice(first, first + len(part))
            self._numbers[own], self._scales[0, own] = quantize_rows_float8(part, columns)
            first = own.stop
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
        pointwise.quantize_rows,
        (num_rows,),
        *(hidden, numbers, scales),
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
