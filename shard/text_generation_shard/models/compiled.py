"""The layers of a model as one call of the processor's own kernels."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.attention.base import AttentionBackend, AttentionPlan
from text_generation_shard.layers.rotary import KernelRotation, Rotation
from text_generation_shard.models.config import ModelConfig

if TYPE_CHECKING:
    from text_generation_shard.attention.packed import PackedAttention


class Layer(Protocol):
    """What a loaded layer tells."""

    def fields(self, kind: Any) -> dict[str, int] | None:
        """See Linear.fields."""


def compiled_layers(
    layers: Sequence[Layer],
    config: ModelConfig,
    backend: AttentionBackend,
    dtype: torch.dtype,
    quantize: str | None,
) -> "CompiledLayers | None":
    """The loaded layers as one; None if the kernels do not take all of them: torch's attention, or
    weights of several kinds."""
    if backend.name != "packed":
        return None
    from text_generation_shard.attention.packed import PackedAttention
    from text_generation_shard.kernels.vector import INT4, INT8, marker

    assert isinstance(backend, PackedAttention)
    kind = {None: marker(dtype), "int8": INT8, "int4": INT4}.get(quantize)
    fields = [layer.fields(kind) for layer in layers]
    if any(item is None for item in fields):
        return None
    return CompiledLayers(
        [item for item in fields if item is not None], kind, config, backend, dtype
    )


class CompiledLayers:
    """Runs layers whose weights others own. Owns their addresses."""

    def __init__(
        self,
        fields: Sequence[dict[str, int]],
        weight_kind: Any,
        config: ModelConfig,
        backend: "PackedAttention",
        dtype: torch.dtype,
    ) -> None:
        """`fields` of each layer, all with weights of one kind."""
        from numba import typeof

        from text_generation_shard.kernels import layers
        from text_generation_shard.kernels.vector import marker

        self._kernels, self._backend, self._dtype = layers, backend, dtype
        self._kinds = weight_kind, marker(dtype)
        self._codes = layers.codes(*(typeof(marker) for marker in self._kinds))
        self._layers = np.zeros(len(fields), layers.LAYER)
        for place, layer in enumerate(fields):
            for name in layers.FIELDS:
                self._layers[place][name] = layer.get(name, 0)
        heads, kv_heads = config.num_heads, config.num_kv_heads
        sizes = config.hidden_size, config.intermediate_size, heads, kv_heads, config.head_dim
        self._sizes = layers.Sizes(*sizes, config.rope.rotary_dim // 2)
        scales = config.attention_scale, config.norm_eps, config.residual_multiplier
        self._constants = layers.Constants(*(np.float32(number) for number in scales))
        # Of the buffers of a pass but the hidden states themselves.
        size, width = config.hidden_size, (heads + 2 * kv_heads) * config.head_dim
        self._widths = size, size, width, heads * config.head_dim, config.intermediate_size

    def __call__(self, hidden: Tensor, rotation: Rotation, plan: AttentionPlan) -> Tensor:
        """hidden [T, hidden_size] goes through all layers in place, but for what the last one adds:
        that is returned."""
        from text_generation_shard.attention.packed import PackedPlan

        cache = self._backend.cache
        assert isinstance(rotation, KernelRotation) and isinstance(plan, PackedPlan)
        assert cache is not None and hidden.is_contiguous()
        rows = [torch.empty(len(hidden), width, dtype=self._dtype) for width in self._widths]
        pages = cache.layer(0), cache.layer_bytes, cache.num_blocks
        self._kernels.run_layers(
            *self._kinds,
            self._codes,
            self._layers,
            self._sizes,
            self._constants,
            self._kernels.Buffers(hidden.data_ptr(), *(buffer.data_ptr() for buffer in rows)),
            rotation.angles.data_ptr(),
            self._kernels.Pages(*pages, plan.slots, plan.block_tables, plan.tasks),
        )
        return rows[1]
