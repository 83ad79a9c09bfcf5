"""Self-attention: projections and rotation around an attention backend."""

from typing import Any

from torch import Tensor

from text_generation_shard.device.attention import AttentionBackend, AttentionPlan
from text_generation_shard.layers.linear import Linear
from text_generation_shard.layers.norm import RMSNorm
from text_generation_shard.layers.rotary import Rotation
from text_generation_shard.models.config import ModelConfig
from text_generation_shard.weights import Parameters


class Attention:
    """One layer's attention. Queries are scaled here, so that backends need no scale."""

    def __init__(
        self,
        parameters: Parameters,
        config: ModelConfig,
        prefix: str,
        layer: int,
        backend: AttentionBackend,
    ) -> None:
        self._layer = layer
        self._backend = backend
        self._window = config.layer_windows[layer]
        self._uses_rope = config.layer_uses_rope[layer]
        self._scale = config.attention_scale
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        names = (
            {"qkv_proj": query + 2 * kv}
            if config.fused_projections
            else {"q_proj": query, "k_proj": kv, "v_proj": kv}
        )
        outputs = {f"{prefix}.{name}": rows for name, rows in names.items()}
        self._qkv = Linear(parameters, outputs, config.hidden_size, config.qkv_bias)
        out = {f"{prefix}.o_proj": config.hidden_size}
        self._out = Linear(parameters, out, query, config.output_bias)
        self._query_norm: RMSNorm | None = None
        self._key_norm: RMSNorm | None = None
        if config.qk_norm:
            self._query_norm = RMSNorm(
                parameters, f"{prefix}.q_norm", config.head_dim, config.norm_eps
            )
            self._key_norm = RMSNorm(
                parameters, f"{prefix}.k_norm", config.head_dim, config.norm_eps
            )

    def fields(self, kind: Any) -> dict[str, int] | None:
        """See Linear.fields."""
        qkv, out = self._qkv.fields("qkv", kind), self._out.fields("out", kind)
        if qkv is None or out is None:
            return None
        own = {"is_turned": int(self._uses_rope), "window": self._window or 0}
        if self._query_norm is not None and self._key_norm is not None:
            own |= {"query_norm": self._query_norm.address, "key_norm": self._key_norm.address}
        return qkv | out | own

    def __call__(self, hidden: Tensor, rotation: Rotation, plan: AttentionPlan) -> Tensor:
        """hidden [T, hidden_size] → [T, hidden_size]."""
        heads = self._qkv(hidden).view(hidden.shape[0], -1, self._head_dim)
        # All that follows happens in the projection's own output: queries, keys, values.
        query, key_value = heads[:, : self._num_heads], heads[:, self._num_heads :]
        if self._query_norm is not None and self._key_norm is not None:
            key = key_value[:, : self._num_kv_heads]
            query.copy_(self._query_norm(query))
            key.copy_(self._key_norm(key))
        if self._uses_rope:
            # Queries and keys turn by the same angles: one call for both.
            rotation.turn_(
                heads, self._num_heads + self._num_kv_heads, self._num_heads, self._scale
            )
        else:
            query.mul_(self._scale)
        return self._out(self._backend.forward(query, key_value, self._layer, self._window, plan))
