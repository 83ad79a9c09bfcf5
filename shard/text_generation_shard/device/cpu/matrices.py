"""Weights in the forms that the CPU multiplies.

Where our kernels are not used, torch's packed kernels multiply int8 and int4 weights. These need
bfloat16 activations. With other dtypes, and in int8 with many rows, the weight is dequantized, a
part at a time, and multiplied as a float.
"""

import torch
from torch import Tensor

from text_generation_shard.device.base import ALL
from text_generation_shard.device.cpu.kernels.linear import GroupedWeight, PackedWeight
from text_generation_shard.device.reference.matrices import (
    GROUP,
    Int8Table,
    dtype_name,
    parts_of,
    quantize_groups,
    quantize_rows,
)

# Most rows for which the kernel for int8 is faster than dequantizing.
_FEW_ROWS_INT8 = 8
# Most values dequantized at once: 8 MiB in bfloat16.
_DEQUANTIZED_NUMBERS = 2**22
# The int4 kernel computes whole vectors of outputs.
_INT4_STEP = 16


class Int8Matrix(Int8Table):
    """See `Int8Table`."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, columns: slice = ALL) -> None:
        """`dtype` of the activations; the scale is rounded to it before q is chosen. columns: see
        Device.matrix."""
        parts = [quantize_rows(part, dtype, columns) for part in parts_of(weight)]
        numbers, scales = zip(*parts, strict=True)
        self._numbers, self._scales, self._dtype = torch.cat(numbers), torch.cat(scales), dtype
        self._few_rows = _FEW_ROWS_INT8 if dtype == torch.bfloat16 else 0
        self.nbytes = self._numbers.nbytes + self._scales.nbytes

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden [T, K] → [T, N]."""
        hidden = hidden.contiguous()
        if hidden.shape[0] <= self._few_rows:
            out: Tensor = torch.ops.aten._weight_int8pack_mm(hidden, self._numbers, self._scales)
        else:
            # Integers up to 127 are exact in every float dtype, so the scale can be applied last.
            outputs = max(1, _DEQUANTIZED_NUMBERS // hidden.shape[1])
            parts = torch.split(self._numbers, outputs)
            out = torch.cat([hidden @ part.to(hidden.dtype).t() for part in parts], dim=1)
            out.mul_(self._scales)
        return out if bias is None else out.add_(bias)


class Int4Matrix:
    """A weight [N, K] as q from 0 to 15 with a scale and a zero for each output and group of 32
    inputs: w ≈ scale · (q - 8) + zero; 5 bits per weight with bfloat16 scales. Other dtypes take 8
    bits for each q."""

    kind = "int4"

    def __init__(self, weight: Tensor, dtype: torch.dtype, columns: slice = ALL) -> None:
        """`dtype` of the activations; scale and zero are rounded to it before q is chosen."""
        weight = weight[:, columns].contiguous()
        parts = [quantize_groups(part, dtype) for part in parts_of(weight)]
        numbers, scales, zeros = zip(*parts, strict=True)
        self._is_packed = dtype == torch.bfloat16
        # [N, K / 32, 2]
        self._scale_zero = torch.stack((torch.cat(scales), torch.cat(zeros)), dim=-1)
        if self._is_packed:
            pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
            self._numbers = torch.cat([pack(part, 1) for part in numbers])
            # As the kernel reads it.
            self._scale_zero = self._scale_zero.transpose(0, 1).contiguous()
        else:
            self._numbers = torch.cat([part.sub(8).char() for part in numbers])
        self.nbytes = self._numbers.nbytes + self._scale_zero.nbytes

    @staticmethod
    def obstacle_of(weight: Tensor) -> str:
        """Why the weight can not be int4; empty when it can."""
        if weight.shape[1] % GROUP:
            return f"{weight.shape[1]} inputs are not a multiple of {GROUP}"
        if weight.shape[0] % _INT4_STEP:
            return f"{weight.shape[0]} outputs are not a multiple of {_INT4_STEP}"
        return ""

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden [T, K] → [T, N]."""
        hidden = hidden.contiguous()
        if self._is_packed:
            out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
                hidden, self._numbers, GROUP, self._scale_zero
            )
        else:
            outputs = max(1, _DEQUANTIZED_NUMBERS // hidden.shape[1])
            parts = zip(
                torch.split(self._numbers, outputs),
                torch.split(self._scale_zero, outputs),
                strict=True,
            )
            out = torch.cat([hidden @ _dequantized(*part).t() for part in parts], dim=1)
        return out if bias is None else out.add_(bias)


def _dequantized(numbers: Tensor, scale_zero: Tensor) -> Tensor:
    scale, zero = scale_zero.unsqueeze(2).unbind(-1)
    groups = numbers.view(len(numbers), -1, GROUP).to(scale.dtype)
    return torch.addcmul(zero, groups, scale).flatten(1)


class OneDnnMatrix:
    """A bfloat16 weight in oneDNN's layout; F.linear would convert it on every call."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.kind, self.nbytes = dtype_name(weight.dtype), weight.nbytes

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Matrix."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._weight, bias, "none", [], "")
        return out


class PackedInt8Matrix(PackedWeight, Int8Table):
    """`Int8Matrix` for bfloat16 rows: the kernels convert the values to bfloat16, exactly, for any
    number of rows."""

    kind = "int8"

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
        self._scales = torch.cat(scales).float()
        super().__init__(torch.cat(numbers), self._scales, is_gated, part)


class PackedInt4Matrix(GroupedWeight):
    """`Int4Matrix` for bfloat16 rows: the kernels look up the 16 values in a table."""

    obstacle_of = staticmethod(Int4Matrix.obstacle_of)

    def __init__(
        self,
        weight: Tensor,
        dtype: torch.dtype,
        is_gated: bool = False,
        columns: slice = ALL,
        part: int | None = None,
    ) -> None:
        """columns: see Device.matrix; `is_gated`, part: see PackedWeight."""
        weight = weight[:, columns].contiguous()
        parts = [quantize_groups(rows, dtype) for rows in parts_of(weight)]
        numbers, scales, zeros = zip(*parts, strict=True)
        small = torch.cat([rows.to(torch.int8) for rows in numbers])
        super().__init__(small, torch.cat(scales), torch.cat(zeros), is_gated, part)
