"""Weights in the forms that the CPU multiplies.

Every quantized form has `obstacle_of(weight)`: why it can not store a weight (empty: it can). Its
constructor takes (weight, dtype of the activations).
"""

import torch
from torch import Tensor

from text_generation_shard.device.base import ALL, Matrix
from text_generation_shard.device.cpu.kernels.linear import GroupedWeight, PackedWeight
from text_generation_shard.device.cpu.quantized import Int4Matrix, Int8Matrix
from text_generation_shard.device.reference.linear import dtype_name
from text_generation_shard.device.reference.quantized import (
    parts_of,
    quantize_groups,
    quantize_rows,
)


class OneDnnMatrix:
    """A bfloat16 weight in oneDNN's layout; F.linear would convert it on every call."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.kind, self.nbytes = dtype_name(weight.dtype), weight.nbytes

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Matrix."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._weight, bias, "none", [], "")
        return out


class PackedInt8Matrix(PackedWeight):
    """`Int8Matrix` for bfloat16 rows: the kernels convert the values to bfloat16, exactly, for any
    number of rows."""

    kind = "int8"
    obstacle_of = staticmethod(Int8Matrix.obstacle_of)

    def __init__(
        self,
        weight: Tensor,
        dtype: torch.dtype,
        is_gated: bool = False,
        columns: slice = ALL,
        part: int | None = None,
    ) -> None:
        """columns: see Device.matrix; `is_gated`, part: see PackedWeight."""
        parts = [quantize_rows(rows, dtype, columns) for rows in parts_of(weight)]
        numbers, scales = zip(*parts, strict=True)
        self._scale = torch.cat(scales).float()
        super().__init__(torch.cat(numbers), self._scale, is_gated, part)

    def lookup(self, ids: Tensor) -> Tensor:
        """See EmbeddingTable."""
        rows = self.rows(ids).float()
        out: Tensor = rows.mul_(self._scale.index_select(0, ids)[:, None]).to(self._dtype)
        return out

    def as_matrix(self) -> tuple[Matrix, int]:
        """See EmbeddingTable."""
        return self, 0


class PackedInt4Matrix(GroupedWeight):
    """`Int4Matrix` for bfloat16 rows: the kernels look up the 16 values in a table."""

    obstacle_of = staticmethod(Int4Matrix.obstacle_of)

    def __init__(
        self,
        weight: Tensor,
        dtype: torch.dtype,
        is_gated: bool = False,
        part: int | None = None,
    ) -> None:
        """`is_gated`, part: see PackedWeight."""
        parts = [quantize_groups(rows, dtype) for rows in parts_of(weight)]
        numbers, scales, zeros = zip(*parts, strict=True)
        small = torch.cat([rows.to(torch.int8) for rows in numbers])
        beside = torch.cat(scales), torch.cat(zeros)
        super().__init__(small, *beside, is_gated, part)
