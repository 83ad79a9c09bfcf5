"""Weights multiplied by torch, and how weights are quantized to 8 or 4 bits.

int8 and int4 quantize only weights; activations and sums keep their dtype. fp8 quantizes both
operands of a product."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_shard.device.base import ALL, Activation, Matrix

GROUP: int = 32
"""Inputs that share a scale and a zero in int4, as in llama.cpp's Q4_0."""

# torch's int8 kernel for CPUs reads whole vectors of inputs, also beyond the end of the matrix; a
# GPU's widest loads need aligned rows.
_INT8_STEP = 16
# A part consists of whole panels of this number of rows, and has at most this number of values, so
# that its intermediate results stay in the second-level cache.
_PANEL = 64
_FITTED_NUMBERS = 2**18
# Iterations that alternately fit scale and zero to the quantized values, and the values to these.
_INT4_FITS = 2

_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.RELU: F.relu,
}


def dtype_name(dtype: torch.dtype) -> str:
    """For example float32 or bfloat16."""
    return str(dtype).removeprefix("torch.")


class FloatMatrix:
    """See `Matrix`."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.kind, self.nbytes = dtype_name(weight.dtype), weight.nbytes

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Matrix."""
        return F.linear(hidden, self._weight, bias)


def gate(activation: Activation, both: Tensor) -> Tensor:
    """both [T, 2 * N] → [T, N]: activation(first half) * second half."""
    gates, ups = both.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gates).mul_(ups)


class GatedMatrix:
    """A gated weight [2 * N, K] in any form: a product, then `gate`."""

    def __init__(
        self,
        matrix: Matrix,
        activation: Activation,
        gate: Callable[[Activation, Tensor], Tensor] = gate,
    ) -> None:
        self._matrix, self._gate = matrix, partial(gate, activation)
        self.kind, self.nbytes = matrix.kind, matrix.nbytes

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden [T, K] → [T, N]; bias [2 * N]."""
        return self._gate(self._matrix(hidden, bias))


class FloatTable:
    """See `EmbeddingTable`."""

    def __init__(self, weight: Tensor, to_matrix: Callable[[Tensor], Matrix]) -> None:
        """`to_matrix` makes a matrix from the table."""
        self.weight, self._to_matrix = weight.contiguous(), to_matrix
        self.kind, self.nbytes = dtype_name(weight.dtype), weight.nbytes

    def lookup(self, ids: Tensor) -> Tensor:
        """See EmbeddingTable."""
        return F.embedding(ids, self.weight)

    def as_matrix(self) -> tuple[Matrix, int]:
        """See EmbeddingTable."""
        matrix = self._to_matrix(self.weight)
        # A float matrix shares the memory of the table.
        return matrix, 0 if isinstance(matrix, FloatMatrix) else matrix.nbytes


def parts_of(weight: Tensor, most: int = _FITTED_NUMBERS) -> tuple[Tensor, ...]:
    """Split a weight into parts of whole panels, of about `most` values each. So no large matrix is
    ever copied to float32 as a whole."""
    return torch.split(weight, max(1, most // weight.shape[1] // _PANEL) * _PANEL)


class Int8Table:
    """A weight [N, K] as int8 q with one scale for each output: w ≈ scale · q. The error is at most
    half a scale, which is 1/254 of the largest value of the row. See `EmbeddingTable`."""

    kind = "int8"
    # [N, K] and [N]; dtype of results.
    _numbers: Tensor
    _scales: Tensor
    _dtype: torch.dtype

    @staticmethod
    def obstacle_of(weight: Tensor) -> str:
        """Why the weight can not be int8; empty when it can."""
        if weight.shape[1] % _INT8_STEP:
            return f"{weight.shape[1]} inputs are not a multiple of {_INT8_STEP}"
        return ""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of q: ids [T] → [T, K]."""
        return self._numbers.index_select(0, ids)

    def lookup(self, ids: Tensor) -> Tensor:
        """See EmbeddingTable."""
        scales = self._scales.index_select(0, ids)[:, None]
        return self.rows(ids).to(scales.dtype).mul_(scales).to(self._dtype)

    def as_matrix(self) -> tuple[Matrix, int]:
        """See EmbeddingTable; the classes derived from this one are matrices."""
        return cast(Matrix, self), 0


def quantize_rows(
    weight: Tensor, dtype: torch.dtype, columns: slice = ALL
) -> tuple[Tensor, Tensor]:
    """Quantize rows to int8 values [N, K] and a scale [N] of type `dtype`. Only values of `columns`
    are returned; scales are those of whole rows."""
    wide = weight.float()
    scale = _rounded_scale(wide.abs().amax(dim=1) / 127, dtype).to(dtype)
    wide = wide[:, columns]
    return (wide / scale.float()[:, None]).round_().clamp_(-127, 127).char(), scale


def quantize_rows_float8(weight: Tensor, columns: slice = ALL) -> tuple[Tensor, Tensor]:
    """Quantize rows to float8_e4m3fn values [N, K] and a float32 scale [N]: the largest value of a
    row becomes the largest float8 (Micikevicius et al. 2022). columns: see `quantize_rows`."""
    wide = weight.float()
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = wide.abs().amax(dim=1).clamp_min_(1e-30) / largest
    wide = wide[:, columns]
    return (wide / scale[:, None]).to(torch.float8_e4m3fn), scale


def quantize_groups(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups to int32 values [N, K] from 0 to 15, and scale and zero [N, K / 32] of type
    `dtype`, with a small squared error.

    Starts from the minimum and maximum of each group, then alternates: least squares for scale and
    zero, then the nearest values. Both use the rounded scale and zero, so the fit includes their
    rounding.
    """
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / 15).clamp_min_(torch.finfo(torch.float32).tiny)
    scale, zero = _rounded_scale(scale, dtype), _rounded(low + 8 * scale, dtype)
    numbers = _nearest(groups, scale, zero)
    middle = groups.mean(dim=-1)
    for _ in range(_INT4_FITS):
        average = numbers.mean(dim=-1)
        spread = numbers.square().mean(dim=-1) - average.square()
        together = (numbers * groups).mean(dim=-1) - average * middle
        # A group of equal values keeps its scale.
        scale = _rounded_scale(torch.where(spread > 0, together / spread, scale), dtype)
        zero = _rounded(middle - scale * average, dtype)
        numbers = _nearest(groups, scale, zero)
    return numbers.add_(8).int().flatten(1), scale.to(dtype), zero.to(dtype)


def _rounded_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as it is stored; never 0, because it is a divisor."""
    kept, wide = torch.finfo(dtype), torch.finfo(torch.float32)
    return _rounded(scale.clamp_min(max(kept.tiny * kept.eps, wide.tiny)), dtype)


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).float()


def _nearest(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The nearest quantized values, from -8 to 7."""
    return ((groups - zero[..., None]) / scale[..., None]).round_().clamp_(-8, 7)
