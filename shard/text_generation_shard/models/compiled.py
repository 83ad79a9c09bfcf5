"""The layers of a model as one call of the processor's own kernels."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.attention.base import AttentionBackend, AttentionPlan
from text_generation_shard.kernels import Place
from text_generation_shard.layers.rotary import KernelRotation, Rotation
from text_generation_shard.models.config import ModelConfig

if TYPE_CHECKING:
    from text_generation_shard.attention.packed import PackedAttention


class Layer(Protocol):
    """What a loaded layer tells."""

    def fields(self, kind: Any) -> dict[str, int] | None:
        """See Linear.fields."""


class Head(NamedTuple):
    """What makes scores of the last hidden states: the address of the norm before it, and its
    weights; None: they are in a form that the kernels do not take."""

    norm: int
    place: Place | None
    vocab_size: int


def compiled_layers(
    layers: Sequence[Layer],
    head: Head,
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
    head_kind = marker(dtype) if quantize is None else INT8
    fields = [layer.fields(kind) for layer in layers]
    if any(item is None for item in fields):
        return None
    if head.place is None or type(head.place.kind) is not type(head_kind):
        head = head._replace(place=None)
    known = [item for item in fields if item is not None]
    return CompiledLayers(known, head, (kind, head_kind, marker(dtype)), config, backend, dtype)


class CompiledLayers:
    """Runs layers whose weights others own. Owns their addresses."""

    def __init__(
        self,
        fields: Sequence[dict[str, int]],
        head: Head,
        kinds: tuple[Any, Any, Any],
        config: ModelConfig,
        backend: "PackedAttention",
        dtype: torch.dtype,
    ) -> None:
        """`fields` of each layer, all with weights of one kind; kinds: markers of that, of the
        head's weights and of rows."""
        from numba import config as numba_config
        from numba import get_num_threads, typeof

        from text_generation_shard.kernels import layers
        from text_generation_shard.kernels.linear import aligned
        from text_generation_shard.kernels.team import board_words

        self._names = layers.BUFFERS, layers.PLACES, layers.HEAD
        self._run, self._num_threads = layers.run_layers, get_num_threads
        self._backend, self._dtype = backend, dtype
        self._kinds = kinds
        self._head, self.has_head = head, head.place is not None
        self._layers = np.zeros(len(fields), layers.LAYER)
        for place, layer in enumerate(fields):
            for name in layers.FIELDS:
                self._layers[place][name] = layer.get(name, 0)
        size, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
        width, attended = (heads + 2 * kv_heads) * config.head_dim, heads * config.head_dim
        widths = size, size, width, attended, config.intermediate_size
        # Of the buffers of a pass but the hidden states themselves.
        self._widths = *widths, 2 * -(-max(widths) // layers.NUMBERS_PER_PAIR)
        self._board = aligned(board_words(numba_config.NUMBA_NUM_THREADS), torch.int64)
        self._pass = np.zeros(1, layers.PASS)
        half = config.rope.rotary_dim // 2
        sizes = size, config.intermediate_size, heads, kv_heads, config.head_dim, half
        constants = config.attention_scale, config.norm_eps, config.residual_multiplier
        codes = layers.codes(*(typeof(marker) for marker in self._kinds))
        self._set(codes.keys(), codes.values())
        self._set(layers.SIZES, sizes)
        self._set(layers.CONSTANTS, constants)

    def _set(self, names: Iterable[str], values: Iterable[float]) -> None:
        for name, value in zip(names, values, strict=True):
            self._pass[name] = value

    def __call__(self, hidden: Tensor, rotation: Rotation, plan: AttentionPlan) -> Tensor:
        """hidden [T, hidden_size] goes through all layers in place, but for what the last one adds:
        that is returned."""
        return self._compute(hidden, None, rotation, plan)

    def logits(self, hidden: Tensor, rotation: Rotation, plan: AttentionPlan) -> Tensor:
        """hidden [T, hidden_size] goes through all layers in place; returns what the head makes of
        it: [T, vocab_size]. Only if it `has_head`."""
        logits = torch.empty(len(hidden), self._head.vocab_size, dtype=self._dtype)
        self._compute(hidden, logits, rotation, plan)
        return logits

    def _compute(
        self, hidden: Tensor, logits: Tensor | None, rotation: Rotation, plan: AttentionPlan
    ) -> Tensor:
        """Returns what the last layer adds."""
        from text_generation_shard.attention.packed import PackedPlan

        cache = self._backend.cache
        assert isinstance(rotation, KernelRotation) and isinstance(plan, PackedPlan)
        assert cache is not None and hidden.is_contiguous()
        rows = [torch.empty(len(hidden), width, dtype=self._dtype) for width in self._widths]
        self._set(self._names[0], (buffer.data_ptr() for buffer in (hidden, *rows)))
        place = self._head.place
        if logits is None or place is None:
            self._pass["head"] = 0
        else:
            where = self._head.norm, place.weight, place.scales, logits.data_ptr(), len(logits[0])
            self._set(self._names[2], where)
        self._set(
            self._names[1],
            (
                rotation.angles.data_ptr(),
                cache.layer(0),
                cache.layer_bytes,
                cache.num_blocks,
                self._board.data_ptr(),
                self._num_threads(),
            ),
        )
        seen = plan.slots, plan.block_tables, plan.tasks
        self._run(*self._kinds, self._pass, self._layers, *seen)
        return rows[1]
