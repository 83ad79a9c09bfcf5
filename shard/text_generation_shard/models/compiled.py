"""The layers of a model as one call of the processor's own kernels."""

from collections.abc import Sequence
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


# Numbers, 64 bytes at least.
LINE = 32


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
    """Runs layers whose weights others own. Owns their addresses, and the board of the threads that
    go through a pass: of one pass at a time."""

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
        # Of the buffers of a pass but the hidden states themselves; the second is what is added.
        self._widths = *widths, 2 * -(-max(widths) // layers.NUMBERS_PER_PAIR)
        self._board = aligned(board_words(numba_config.NUMBA_NUM_THREADS), torch.int64)
        self._pass = np.zeros(1, layers.PASS)
        self._changing = np.frombuffer(self._pass, np.int64, len(layers.CHANGING))
        half = config.rope.rotary_dim // 2
        sizes = size, config.intermediate_size, heads, kv_heads, config.head_dim, half
        scales = 0 if head.place is None else head.place.scales
        others = self._board.data_ptr(), head.norm, scales, head.vocab_size
        constants = config.attention_scale, config.norm_eps, config.residual_multiplier
        fixed: dict[str, float] = {}
        fixed |= layers.codes(*(typeof(marker) for marker in kinds))
        fixed |= dict(zip(layers.SIZES, sizes, strict=True))
        fixed |= dict(zip(layers.OTHERS, others, strict=True))
        fixed |= dict(zip(layers.CONSTANTS, constants, strict=True))
        for name, value in fixed.items():
            self._pass[name] = value

    def __call__(self, hidden: Tensor, rotation: Rotation, plan: AttentionPlan) -> Tensor:
        """hidden [T, hidden_size] goes through all layers in place, but for what the last one adds:
        that is returned."""
        memory, start = self._compute(hidden, None, rotation, plan)
        return memory[start : start + hidden.numel()].view_as(hidden)

    def logits(self, hidden: Tensor, rotation: Rotation, plan: AttentionPlan) -> Tensor:
        """hidden [T, hidden_size] goes through all layers in place; returns what the head makes of
        it: [T, vocab_size]. Only if it `has_head`."""
        logits = torch.empty(len(hidden), self._head.vocab_size, dtype=self._dtype)
        self._compute(hidden, logits, rotation, plan)
        return logits

    def _compute(
        self, hidden: Tensor, logits: Tensor | None, rotation: Rotation, plan: AttentionPlan
    ) -> tuple[Tensor, int]:
        """Returns memory, and where in it lies what the last layer adds."""
        from text_generation_shard.attention.packed import PackedPlan

        cache = self._backend.cache
        assert isinstance(rotation, KernelRotation) and isinstance(plan, PackedPlan)
        assert cache is not None and hidden.is_contiguous()
        # One piece of memory for all of them, each from a cache line on.
        starts = [0]
        for width in self._widths:
            starts.append(-(-(starts[-1] + len(hidden) * width) // LINE) * LINE)
        memory = torch.empty(starts[-1], dtype=self._dtype)
        first, size = memory.data_ptr(), memory.itemsize
        scores = 0, 0
        if logits is not None and self._head.place is not None:
            scores = logits.data_ptr(), self._head.place.weight
        self._changing[:] = (
            hidden.data_ptr(),
            *(first + start * size for start in starts[:-1]),
            *scores,
            rotation.angles.data_ptr(),
            cache.layer(0),
            cache.layer_bytes,
            cache.num_blocks,
            self._num_threads(),
        )
        seen = plan.slots, plan.block_tables, plan.tasks
        self._run(*self._kinds, self._pass, self._layers, *seen)
        return memory, starts[1]
