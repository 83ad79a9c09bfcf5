"""Weights as the processor's own kernels multiply them; `kernels` is imported when one is made."""

import torch
from torch import Tensor

from text_generation_shard.device.cpu.kernels import Place
from text_generation_shard.device.cpu.quantized import (
    Int4Matrix,
    Int8Matrix,
    parts_of,
    quantize_groups,
    quantize_rows,
)


class TiledMatrix:
    """The weight in the layout of `kernels.linear`; see there what it is compared with."""

    def __init__(self, weight: Tensor, is_gated: bool = False) -> None:
        """`is_gated`: the product goes through silu and halves; see GatedWeight."""
        from text_generation_shard.device.cpu.kernels.linear import GatedWeight, PackedWeight

        self._weight = (GatedWeight if is_gated else PackedWeight)(weight)
        self.nbytes = self._weight.nbytes

    @property
    def place(self) -> Place | None:
        """See Matrix."""
        return self._weight.place

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden [T, K] → [T, N]."""
        out = self._weight(hidden.contiguous())
        return out if bias is None else out.add_(bias)


class TiledInt8Matrix:
    """`Int8Matrix` for bfloat16 rows: the numbers become bfloat16, exactly, on their way into the
    products, for any number of rows. All linears of the 125 M checkpoint, against torch's kernel:
    3.5 to 4.3 and 5.9 ms at 1 row."""

    kind = "int8"
    obstacle = staticmethod(Int8Matrix.obstacle)

    def __init__(self, weight: Tensor, dtype: torch.dtype, is_gated: bool = False) -> None:
        from text_generation_shard.device.cpu.kernels.linear import GatedWeight, PackedWeight

        numbers, scales = zip(
            *(quantize_rows(part, dtype) for part in parts_of(weight)), strict=True
        )
        self._dtype = dtype
        self._scale = torch.cat(scales).float()
        form = GatedWeight if is_gated else PackedWeight
        self._weight = form(torch.cat(numbers), self._scale)
        self.nbytes = self._weight.nbytes

    @property
    def place(self) -> Place | None:
        """See Matrix."""
        return self._weight.place

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden [T, K] → [T, N]."""
        out = self._weight(hidden.contiguous())
        return out if bias is None else out.add_(bias)

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows of the matrix as floats: ids [T] → [T, K]."""
        rows = self._weight.rows(ids).float()
        return rows.mul_(self._scale.index_select(0, ids)[:, None]).to(self._dtype)


class TiledInt4Matrix:
    """`Int4Matrix` for bfloat16 rows, likewise, by a table of the 16 numbers."""

    kind = "int4"
    obstacle = staticmethod(Int4Matrix.obstacle)

    def __init__(self, weight: Tensor, dtype: torch.dtype, is_gated: bool = False) -> None:
        from text_generation_shard.device.cpu.kernels.grouped_linear import GroupedWeight

        parts = [quantize_groups(part, dtype) for part in parts_of(weight)]
        numbers, scales, zeros = zip(*parts, strict=True)
        self._weight = GroupedWeight(
            torch.cat([part.to(torch.int8) for part in numbers]),
            torch.cat(scales),
            torch.cat(zeros),
            is_gated,
        )
        self.nbytes = self._weight.nbytes

    @property
    def place(self) -> Place | None:
        """See Matrix."""
        return self._weight.place

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden [T, K] → [T, N]."""
        out = self._weight(hidden.contiguous())
        return out if bias is None else out.add_(bias)
