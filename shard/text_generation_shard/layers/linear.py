"""Projections of hidden states."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from text_generation_shard.device.cpu.matrix import Matrix, hold, hold_gated
from text_generation_shard.weights import Held, Parameters


class Linear:
    """y = x Wᵀ + b, where W stacks the outputs of several named projections.

    One product over stacked weights (q, k and v; gate and up) reads the input once and makes
    fewer, larger calls.
    """

    def __init__(
        self,
        parameters: Parameters,
        outputs: dict[str, int],
        in_features: int,
        bias: bool = False,
        gate: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """With a `gate` the first half of the outputs goes through it and is multiplied with the
        second."""
        self._matrix: Matrix
        self._form = parameters.dtype, parameters.quantize
        self._gate = gate
        self._bias: Tensor | None = None
        if bias:
            self._bias = parameters.add_stacked(
                {f"{name}.bias": (rows,) for name, rows in outputs.items()}
            )
        weights = {f"{name}.weight": rows for name, rows in outputs.items()}
        parameters.add_matrix(weights, in_features, self._receive)

    def fields(self, name: str, kind: Any) -> dict[str, int] | None:
        """Where weight, scales and bias lie, as fields of `kernels.layers.LAYER`, and the bytes of
        the weight; None if the loaded weight is not of numbers of this kind."""
        place = self._matrix.place
        if place is None or type(place.kind) is not type(kind):
            return None
        bias = 0 if self._bias is None else self._bias.data_ptr()
        beside = {f"{name}_scales": place.scales, f"{name}_bias": bias}
        return {name: place.weight, f"{name}_bytes": place.nbytes} | beside

    def _receive(self, weight: Tensor) -> Held:
        if self._gate is None:
            self._matrix, held = hold(weight, *self._form)
        else:
            has_bias = self._bias is not None
            self._matrix, held = hold_gated(weight, *self._form, self._gate, has_bias)
        return held

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, in_features] → [T, sum of outputs], or half of them behind a gate."""
        return self._matrix(hidden, self._bias)
