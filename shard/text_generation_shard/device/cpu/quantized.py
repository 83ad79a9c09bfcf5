"""int8 and int4 weights, multiplied by torch's packed kernels; used where our kernels are not
(`linear`).

torch's kernels are made for few rows, where reading the weights takes the time. For more rows, the
weight is dequantized to bfloat16, a part at a time, and multiplied as a float. The kernels need
bfloat16 activations; with other dtypes, the weight is dequantized for any number of rows.
"""

import sys
from functools import cache

import torch
from torch import Tensor

from text_generation_shard.device.base import ALL, Matrix
from text_generation_shard.device.reference.quantized import (
    GROUP,
    parts_of,
    quantize_groups,
    quantize_rows,
)

# Most rows for which the packed kernels are faster than dequantizing.
_FEW_ROWS_INT8 = 8
_FEW_ROWS_INT4 = 96
# Most values dequantized at once: 8 MiB in bfloat16.
_DEQUANTIZED_NUMBERS = 2**22
# The int8 kernel reads whole vectors of inputs, also beyond the end of the matrix.
_INT8_STEP = 16
# int4 layout: panels of 64 outputs, the rest in pairs.
_INT4_STEP = 16
_PANEL = 64


class Int8Matrix:
    """A weight [N, K] as int8 with one scale for each output: w ≈ scale · q.

    The error is at most half a scale, which is 1/254 of the largest value of the row.
    """

    kind = "int8"

    def __init__(
        self,
        weight: Tensor,
        dtype: torch.dtype,
        columns: slice = ALL,
    ) -> None:
        """`dtype` of the activations; the scale is rounded to it before q is chosen. columns: see
        Device.matrix."""
        parts = [quantize_rows(part, dtype, columns) for part in parts_of(weight)]
        numbers, scales = zip(*parts, strict=True)
        self._numbers, self._scale = torch.cat(numbers), torch.cat(scales)
        self._few_rows = _FEW_ROWS_INT8 if dtype == torch.bfloat16 else 0
        self.nbytes = self._numbers.nbytes + self._scale.nbytes

    @staticmethod
    def obstacle_of(weight: Tensor) -> str:
        """Why the weight can not be int8; empty when it can."""
        if weight.shape[1] % _INT8_STEP:
            return f"{weight.shape[1]} inputs are not a multiple of {_INT8_STEP}"
        return ""

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden [T, K] → [T, N]."""
        hidden = hidden.contiguous()
        if hidden.shape[0] <= self._few_rows:
            out: Tensor = torch.ops.aten._weight_int8pack_mm(hidden, self._numbers, self._scale)
        else:
            # Integers up to 127 are exact in every float dtype, so the scale can be applied last.
            outputs = max(1, _DEQUANTIZED_NUMBERS // hidden.shape[1])
            parts = torch.split(self._numbers, outputs)
            out = torch.cat([hidden @ part.to(hidden.dtype).t() for part in parts], dim=1)
            out.mul_(self._scale)
        return out if bias is None else out.add_(bias)

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows of the matrix as floats: ids [T] → [T, K]."""
        rows = self._numbers.index_select(0, ids).to(self._scale.dtype)
        return rows.mul_(self._scale.index_select(0, ids)[:, None])

    def as_matrix(self) -> tuple[Matrix, int]:
        """See EmbeddingTable."""
        return self, 0


class Int4Matrix:
    """A weight [N, K] as q from 0 to 15 with a scale and a zero for each output and group of 32
    inputs: w ≈ scale · (q - 8) + zero; 5 bits per weight with bfloat16 scales."""

    kind = "int4"

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        """`dtype` of the activations; scale and zero are rounded to it before q is chosen."""
        self._num_outputs = weight.shape[0]
        # Outputs in whole panels; the packed kernel computes the others for any number of rows.
        self._num_whole = self._num_outputs // _PANEL * _PANEL
        parts = [quantize_groups(part, dtype) for part in parts_of(weight)]
        numbers, scales, zeros = zip(*parts, strict=True)
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self._packed = torch.cat([pack(part, 1) for part in numbers])
        # [K / 32, N, 2], as the kernel reads it.
        scale_zero = torch.stack((torch.cat(scales), torch.cat(zeros)), dim=-1)
        self._scale_zero = scale_zero.transpose(0, 1).contiguous()
        self._few_rows = _FEW_ROWS_INT4 if dtype == torch.bfloat16 else 0
        if not _is_layout_known():
            self._few_rows = sys.maxsize
        self.nbytes = self._packed.nbytes + self._scale_zero.nbytes

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
        if hidden.shape[0] <= self._few_rows:
            out = self._multiply_packed(hidden, 0)
        else:
            outputs = max(_PANEL, _DEQUANTIZED_NUMBERS // hidden.shape[1] // _PANEL * _PANEL)
            parts = []
            for start in range(0, self._num_whole, outputs):
                end = min(start + outputs, self._num_whole)
                parts.append(hidden @ self._dequantize(start, end))
            if self._num_whole < self._num_outputs:
                parts.append(self._multiply_packed(hidden, self._num_whole))
            out = torch.cat(parts, dim=1)
        return out if bias is None else out.add_(bias)

    def _multiply_packed(self, hidden: Tensor, start: int) -> Tensor:
        """Outputs from `start`, the first of a panel, by the packed kernel."""
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            hidden, self._packed[start:], GROUP, self._scale_zero[:, start:].contiguous()
        )
        return out

    def _dequantize(self, start: int, end: int) -> Tensor:
        """Dequantize outputs of whole panels: [K, end - start]."""
        numbers = _unpack(self._packed[start:end]).to(self._scale_zero.dtype).sub_(8)
        # All operands are [panels, K / 32, 32, 64], so that addcmul also transposes the panels.
        panels, inputs = numbers.shape[:2]
        scale, zero = (
            part.view(-1, panels, 1, _PANEL).transpose(0, 1)
            for part in self._scale_zero[:, start:end].permute(2, 0, 1).contiguous()
        )
        dequantized = torch.empty(inputs, end - start, dtype=numbers.dtype)
        torch.addcmul(
            zero,
            numbers.view(panels, -1, GROUP, _PANEL),
            scale,
            out=dequantized.view(-1, GROUP, panels, _PANEL).permute(2, 0, 1, 3),
        )
        return dequantized


def _unpack(packed: Tensor) -> Tensor:
    """Invert `_convert_weight_to_int4pack_for_cpu` for whole panels: uint8 [panels, K, 64].

    With AVX-512, a byte holds two outputs of one input that are 32 apart in their panel.
    """
    panels = packed.view(-1, packed.shape[1] * 2, _PANEL // 2)
    return torch.cat((panels & 15, panels >> 4), dim=-1)


@cache
def _is_layout_known() -> bool:
    """Whether `_unpack` matches this processor's layout; if not, the packed kernel serves any
    number of rows."""
    numbers = torch.arange(2 * _PANEL * GROUP, dtype=torch.int32) * 7 // 5 % 16
    numbers = numbers.view(2 * _PANEL, GROUP)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    return torch.equal(_unpack(packed).transpose(1, 2).flatten(0, 1), numbers)
