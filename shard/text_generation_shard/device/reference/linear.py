"""Float weights, multiplied by torch."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_shard.device.base import Activation, Matrix

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
