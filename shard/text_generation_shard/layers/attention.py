"""Self-attention: projections around a device's attention."""

from torch import Tensor

from text_generation_shard.checkpoint.config import LlamaConfig
from text_generation_shard.checkpoint.partition import Partition, whole
from text_generation_shard.checkpoint.weights import Parameters, Sections
from text_generation_shard.device.forward import Attention, AttentionPlan
from text_generation_shard.layers.linear import Linear, RMSNorm
from text_generation_shard.parallel import World


class SelfAttention:
    """One layer's attention; ranks share the heads."""

    def __init__(
        self,
        parameters: Parameters,
        world: World,
        config: LlamaConfig,
        own: Partition,
        prefix: str,
        layer: int,
        attention: Attention,
    ) -> None:
        self._layer, self._attention = layer, attention
        self.window, self.uses_rope = config.layer_windows[layer], config.layer_uses_rope[layer]
        self._head_dim = config.head_dim
        self._num_heads, self._num_kv_heads = own.heads.count, own.kv_heads.count
        query, kv = own.heads.times(config.head_dim), own.kv_heads.times(config.head_dim)
        names: Sections = (
            {"qkv_proj": [query, kv, kv]}
            if config.fused_projections
            else {"q_proj": [query], "k_proj": [kv], "v_proj": [kv]}
        )
        outputs = {f"{prefix}.{name}": shares for name, shares in names.items()}
        hidden = whole(config.hidden_size)
        self.qkv = Linear(parameters, world, outputs, hidden, config.qkv_bias)
        out = {f"{prefix}.o_proj": [hidden]}
        part = own.attended_part
        self.out = Linear(parameters, world, out, query, config.output_bias, part)
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if config.qk_norm:
            self.query_norm, self.key_norm = (
                RMSNorm(parameters, f"{prefix}.{name}", config.head_dim, config.norm_eps)
                for name in ("q_norm", "k_norm")
            )

    def __call__(self, hidden: Tensor, plan: AttentionPlan) -> Tensor:
        """hidden [T, hidden_size] → [T, hidden_size]."""
        heads = self.qkv(hidden).view(hidden.shape[0], -1, self._head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            query, key_value = heads[:, : self._num_heads], heads[:, self._num_heads :]
            key = key_value[:, : self._num_kv_heads]
            query.copy_(self.query_norm(query))
            key.copy_(self.key_norm(key))
        return self.out(
            self._attention.forward(heads, self._layer, self.window, self.uses_rope, plan)
        )
