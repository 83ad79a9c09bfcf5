"""The gated feed-forward block."""

from torch import Tensor

from text_generation_shard.checkpoint.config import LlamaConfig
from text_generation_shard.checkpoint.partition import Share, whole
from text_generation_shard.checkpoint.weights import Parameters, Sections
from text_generation_shard.layers.linear import Linear
from text_generation_shard.parallel import World


class GatedMLP:
    """down(act(gate(x)) · up(x)), gate and up in one product. Each rank has a part of the inner
    features."""

    def __init__(
        self,
        parameters: Parameters,
        world: World,
        config: LlamaConfig,
        inner: Share,
        part: int,
        prefix: str,
    ) -> None:
        """part: size of a fixed part, see Partition."""
        names: Sections = (
            {"gate_up_proj": [inner, inner]}
            if config.fused_projections
            else {"gate_proj": [inner], "up_proj": [inner]}
        )
        outputs = {f"{prefix}.{name}": shares for name, shares in names.items()}
        bias, gate = config.mlp_bias, config.activation
        hidden = whole(config.hidden_size)
        self.gate_up = Linear(parameters, world, outputs, hidden, bias, gate=gate)
        down = {f"{prefix}.down_proj": [hidden]}
        self.down = Linear(parameters, world, down, inner, bias, part)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        return self.down(self.gate_up(hidden))
