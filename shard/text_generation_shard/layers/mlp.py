"""The gated feed-forward block."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from text_generation_shard.checkpoint.config import ModelConfig
from text_generation_shard.checkpoint.weights import Parameters, Split
from text_generation_shard.device.base import Activation
from text_generation_shard.errors import ModelError
from text_generation_shard.layers.linear import Linear
from text_generation_shard.parallel import World

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


class GatedMLP:
    """down(act(gate(x)) · up(x)), gate and up in one product. Ranks share the numbers between."""

    def __init__(
        self, parameters: Parameters, world: World, config: ModelConfig, prefix: str
    ) -> None:
        size = config.intermediate_size
        if config.hidden_act not in _ACTIVATIONS:
            raise ModelError(
                f"the activation {config.hidden_act} is not supported; supported are "
                f"{', '.join(_ACTIVATIONS)}"
            )
        names: Mapping[str, Sequence[int]] = (
            {"gate_up_proj": (size, size)}
            if config.fused_projections
            else {"gate_proj": (size,), "up_proj": (size,)}
        )
        outputs = {f"{prefix}.{name}": sizes for name, sizes in names.items()}
        bias, gate = config.mlp_bias, _ACTIVATIONS[config.hidden_act]
        self.gate_up = Linear(
            *(parameters, world, outputs, config.hidden_size), Split.OUTPUTS, bias, gate
        )
        down = {f"{prefix}.down_proj": (config.hidden_size,)}
        self.down = Linear(parameters, world, down, size, Split.INPUTS, bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        return self.down(self.gate_up(hidden))
