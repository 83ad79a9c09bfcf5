"""How a weight lies in memory: the float forms, and the choice between them and the quantised."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_shard.device.cpu import kernels
from text_generation_shard.device.cpu.quantized import Int4Matrix, Int8Matrix
from text_generation_shard.device.cpu.tiled import TiledInt4Matrix, TiledInt8Matrix, TiledMatrix
from text_generation_shard.weights import Held


class Matrix(Protocol):
    """A weight [N, K] that multiplies: owns its only copy."""

    @property
    def place(self) -> kernels.Place | None:
        """Where it lies, in a form that `kernels.layers` takes; None: it is in another."""

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden [T, K] → [T, N], plus bias [N]."""


class FloatMatrix:
    """The weight as it is."""

    place = None

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden [T, K] → [T, N]."""
        return F.linear(hidden, self._weight, bias)


class PackedMatrix:
    """The weight in oneDNN's own layout.

    F.linear reorders a bfloat16 weight on every call; prepacked, the linears of a decode step of
    the 125 M checkpoint take 8.9 instead of 13.8 ms (MEASUREMENTS).
    """

    place = None

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    @staticmethod
    def pays(weight: Tensor) -> bool:
        """Whether there is such a layout for this weight here."""
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
            return False
        return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden [T, K] → [T, N]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._weight, bias, "none", [], "")
        return out


class GatedMatrix:
    """Any form of a weight [2 * N, K] whose product [T, 2 * N] is activation(gate) * up."""

    place = None

    def __init__(self, matrix: Matrix, activation: Callable[[Tensor], Tensor]) -> None:
        self._matrix, self._activation = matrix, activation

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden [T, K] → [T, N]; bias [2 * N]."""
        gate, up = self._matrix(hidden, bias).chunk(2, dim=-1)
        return self._activation(gate).mul_(up)


def hold_gated(
    weight: Tensor,
    dtype: torch.dtype,
    quantize: str | None,
    activation: Callable[[Tensor], Tensor],
    has_bias: bool,
) -> tuple[Matrix, Held]:
    """`hold` for gates above what they let through: what comes out is activation(gate) * up."""
    is_fitting = activation is F.silu and not has_bias and weight.shape[0] % 32 == 0
    if is_fitting and kernels.are_used(dtype, weight.device):
        if quantize is None:
            tiled = TiledMatrix(weight.to(dtype), is_gated=True)
            return tiled, Held(str(dtype).removeprefix("torch."), tiled.nbytes)
        form = TiledInt8Matrix if quantize == "int8" else TiledInt4Matrix
        if not form.obstacle(weight) and _are_tiled(dtype, weight.device):
            quantised = form(weight, dtype, is_gated=True)
            return quantised, Held(quantised.kind, quantised.nbytes)
    held_as, held = hold(weight, dtype, quantize)
    return GatedMatrix(held_as, activation), held


def int8_form(dtype: torch.dtype, device: torch.device) -> type[Int8Matrix] | type[TiledInt8Matrix]:
    """What holds int8 weights for activations of this type."""
    return TiledInt8Matrix if _are_tiled(dtype, device) else Int8Matrix


def are_deterministic(dtype: torch.dtype, quantize: str | None, device: torch.device) -> bool:
    """Whether products of activations of this type never depend on what else is multiplied."""
    if quantize is not None:
        return _are_tiled(dtype, device)
    return kernels.are_used(dtype, device)


def _are_tiled(dtype: torch.dtype, device: torch.device) -> bool:
    is_possible = dtype is torch.bfloat16 and kernels.are_vectors_wide()
    return is_possible and kernels.are_used(dtype, device)


def hold(weight: Tensor, dtype: torch.dtype, quantize: str | None) -> tuple[Matrix, Held]:
    """The weight in the form that multiplies activations of `dtype` best, and what that is.

    `quantize` is int8, int4 or None. What can not be int4 becomes int8, what can not be that
    stays float.
    """
    int8 = int8_form(dtype, weight.device)
    int4 = TiledInt4Matrix if _are_tiled(dtype, weight.device) else Int4Matrix
    forms = {None: (), "int8": (int8,), "int4": (int4, int8)}[quantize]
    obstacle = ""
    for form in forms:
        if not (found := form.obstacle(weight)):
            quantised = form(weight, dtype)
            return quantised, Held(quantised.kind, quantised.nbytes, obstacle)
        obstacle = obstacle or found
    weight, name = weight.to(dtype), str(dtype).removeprefix("torch.")
    if kernels.are_used(dtype, weight.device):
        tiled = TiledMatrix(weight)
        return tiled, Held(name, tiled.nbytes, obstacle)
    matrix = PackedMatrix(weight) if PackedMatrix.pays(weight) else FloatMatrix(weight)
    return matrix, Held(name, weight.nbytes, obstacle)
