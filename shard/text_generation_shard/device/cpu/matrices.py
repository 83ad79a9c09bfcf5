"""Weights in the forms that the CPU multiplies.

`PackedWeight` and the forms derived from it are read by our kernels, see `kernels.multiply`. Where
those are not used, torch's packed kernels multiply int8 and int4 weights. These need bfloat16
activations. With other dtypes, and in int8 with many rows, the weight is dequantized, a part at a
time, and multiplied as a float.
"""

from typing import Any

import torch
from numba import typeof
from torch import Tensor

from text_generation_shard.device.base import ALL
from text_generation_shard.device.cpu.kernels import bfloat12, vector
from text_generation_shard.device.cpu.kernels.llvm import LANES, address_of
from text_generation_shard.device.cpu.kernels.multiply import (
    BLOCK_BYTES,
    NUMBERS_PER_WORD,
    VECTORS,
    multiply,
    multiply_item,
    multiply_signature,
    panel_bytes,
    sum_inputs,
    sums_bytes,
)
from text_generation_shard.device.cpu.kernels.tile import Product, num_parts
from text_generation_shard.device.cpu.kernels.vector import BFLOAT12, INT4, INT8, STEP_BYTES
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


def pack(weight: Tensor, steps_at_once: int = 1) -> Tensor:
    """weight [N, K] as [N / 16, steps, 16, numbers per step], aligned to vectors.

    Rows are zero-padded to a multiple of 16, inputs to a multiple of `steps_at_once` steps. For
    int8 see `_interleave_steps`.
    """
    per_step = _numbers_at_once(weight.dtype)
    outputs, inputs = weight.shape
    panels, steps = -(-outputs // LANES), -(-inputs // (per_step * steps_at_once)) * steps_at_once
    packed = vector.aligned(panels * steps * LANES * per_step, weight.dtype)
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
    return 4 if dtype == torch.int8 else STEP_BYTES // dtype.itemsize


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
        self.weight_kind = INT8 if scales is not None else vector.weights_marker(weight.dtype)
        is_narrow = type(self.weight_kind) is type(BFLOAT12)
        steps_at_once = bfloat12.STEPS if is_narrow else 1
        unit = _numbers_at_once(weight.dtype) * steps_at_once
        self.num_parts = num_parts(self._num_inputs, part, unit)
        packed, beside = pack(weight, steps_at_once), scales
        if is_narrow:
            panels = packed.view(self.num_parts * len(packed), -1, LANES, 2)
            packed, beside = bfloat12.narrow(panels)
        elif scales is not None:
            # Scales are read in whole vectors.
            beside = torch.nn.functional.pad(scales, (0, -len(scales) % LANES))
        self._dtype = torch.bfloat16 if scales is not None else weight.dtype
        self.kind = str(weight.dtype).removeprefix("torch.")
        self.padding = -self._num_inputs % unit
        self._keep(packed, beside)

    def _keep(self, packed: Tensor, beside: Tensor | None) -> None:
        """Keep what does not change between calls, because a call with one row is short."""
        self._packed, self._beside = packed, beside
        self._kind = vector.marker(self._dtype)
        kinds = typeof(self.weight_kind), typeof(self._kind)
        self._code = address_of(multiply_item, multiply_signature(*kinds))
        self.address = vector.tensor_address(packed)
        self.beside_address = vector.tensor_address(beside)
        self._steps = (self._num_inputs + self.padding) // _numbers_at_once(self._dtype)
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
            inputs=vector.tensor_address(hidden, self._dtype),
            out=vector.tensor_address(out),
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


class PackedInt4Matrix(PackedWeight):
    """`Int4Matrix` for bfloat16 rows: the kernels look up the 16 values in a table."""

    kind = "int4"
    obstacle_of = staticmethod(Int4Matrix.obstacle_of)

    def __init__(
        self,
        weight: Tensor,
        dtype: torch.dtype,
        is_gated: bool = False,
        columns: slice = ALL,
        part: int | None = None,
    ) -> None:
        """columns: see Device.matrix; `is_gated`, part: see PackedWeight; a gated weight has twice
        the outputs of the product."""
        weight = weight[:, columns].contiguous()
        outputs, inputs = weight.shape
        self._num_outputs, self._num_inputs = outputs // 2 if is_gated else outputs, inputs
        self._is_gated, self.padding = is_gated, 0
        self.weight_kind, self._dtype = INT4, torch.bfloat16
        # Groups are processed in pairs.
        self.num_parts = num_parts(inputs, part, 2 * GROUP)
        parts = [quantize_groups(rows, dtype) for rows in parts_of(weight)]
        numbers, scales, zeros = zip(*parts, strict=True)
        small = torch.cat([rows.to(torch.int8) for rows in numbers])
        scale, zero = torch.cat(scales), torch.cat(zeros)
        if is_gated:
            small, scale, zero = (interleaved(rows) for rows in (small, scale, zero))
        self._keep(_blocks(small, scale, zero), None)

    def _multiply(self, product: Product) -> None:
        groups = self._num_inputs // GROUP
        sums = torch.empty(product.num_rows * sums_bytes.py_func(groups), dtype=torch.uint8)
        product = product._replace(beside=vector.tensor_address(sums))
        sum_inputs(product)
        super()._multiply(product)


def _blocks(numbers: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The blocks of an int4 weight w = scale * number + zero, see `kernels.multiply`.

    numbers [N, K] from 0 to 15, int8, which represent -8 to 7; scale and zero [N, K / 32] bfloat16;
    N is a multiple of 16, K of 32."""
    panels, groups = len(numbers) // LANES, scale.shape[1]
    # An odd number of groups is padded with zeros; the numbers of the padding are not stored.
    pairs, extra = -(-groups // 2), -groups % 2
    packed = vector.aligned(panels * panel_bytes.py_func(groups), torch.uint8)
    rows = torch.zeros(panels, pairs * BLOCK_BYTES // 2, dtype=torch.int16)
    blocks = rows.view(panels, pairs, 2 * (1 + VECTORS), 2 * LANES)
    zeros, scales = (
        torch.nn.functional.pad(part, (0, extra)).view(torch.int16).view(panels, LANES, pairs, 2)
        for part in (zero, scale)
    )
    blocks[:, :, 0] = zeros.transpose(1, 2).flatten(2)
    blocks[:, :, 1] = scales.permute(0, 2, 3, 1).flatten(2)
    members = numbers.view(panels, LANES, groups, VECTORS, NUMBERS_PER_WORD, 2)
    shifts = 4 * torch.arange(NUMBERS_PER_WORD, dtype=torch.int32)[:, None]
    words = (members.int() << shifts).sum(dim=-2).permute(0, 2, 3, 1, 4).flatten(3)
    words = torch.nn.functional.pad(words, (0, 0, 0, 0, 0, extra))
    blocks[:, :, 2:] = words.view(panels, pairs, 2 * VECTORS, 2 * LANES)
    words = packed.view(torch.int16).view(panels, -1)
    words.copy_(rows[:, : words.shape[1]])
    return packed
