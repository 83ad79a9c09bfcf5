"""The gated feed-forward block."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from text_generation_shard.errors import ModelError
from text_generation_shard.layers.linear import Linear
from text_generation_shard.models.config import ModelConfig
from text_generation_shard.weights import Parameters

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class GatedMLP:
    """down(act(gate(x)) · up(x)), gate and up in one product."""

    def __init__(self, parameters: Parameters, config: ModelConfig, prefix: str) -> None:
        size = config.intermediate_size
        if config.hidden_act not in _ACTIVATIONS:
            raise ModelError(
                f"the activation {config.hidden_act} is not supported; supported are "
                f"{', '.join(_ACTIVATIONS)}"
            )
        names = (
            {"gate_up_proj": 2 * size}
            if config.fused_projections
            else {
                "gate_proj": size,
                "up_proj": size,
            }
        )
        outputs = {f"{prefix}.{name}": rows for name, rows in names.items()}
        gate = _ACTIVATIONS[config.hidden_act]
        self._gate_up = Linear(parameters, outputs, config.hidden_size, config.mlp_bias, gate)
        down = {f"{prefix}.down_proj": config.hidden_size}
        self._down = Linear(parameters, down, size, config.mlp_bias)

    def fields(self, kind: Any) -> dict[str, int] | None:
        """See Linear.fields."""
        gate_up, down = self._gate_up.fields("gate_up", kind), self._down.fields("down", kind)
        return None if gate_up is None or down is None else gate_up | down

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        return self._down(self._gate_up(hidden))
