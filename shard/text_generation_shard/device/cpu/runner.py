"""The layers of a model as one call of the processor's own kernels."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Floats, Ints
from text_generation_shard.device.attention import AttentionBackend, AttentionPlan
from text_generation_shard.device.batch import RowBatch
from text_generation_shard.device.cpu.kernels import Place
from text_generation_shard.models.config import ModelConfig

if TYPE_CHECKING:
    from text_generation_shard.device.cpu.attention import PackedAttention, PackedPlan


class Layer(Protocol):
    """What a loaded layer tells."""

    def fields(self, kind: Any) -> dict[str, int] | None:
        """See Linear.fields."""


class Tokens(NamedTuple):
    """The T tokens of a pass: their ids [T], the angles that turn them, see `KernelRotation`, with
    positions [T], and what attention knows of them."""

    input_ids: Ints
    angles: Tensor
    positions: Ints
    plan: AttentionPlan


class Ends(NamedTuple):
    """What lies before and behind the layers: the address of the tokens' vectors (0: they are in a
    form that the kernels do not take), that of the last norm, and the head's weights (None:
    likewise)."""

    embedding: int
    norm: int
    head: Place | None


def compiled_layers(
    layers: Sequence[Layer],
    ends: Ends,
    config: ModelConfig,
    backend: AttentionBackend,
    dtype: torch.dtype,
    quantize: str | None,
) -> "CompiledLayers | None":
    """The loaded layers as one; None if the kernels do not take all of them: torch's attention, or
    weights of several kinds."""
    if backend.name != "packed":
        return None
    from text_generation_shard.device.cpu.attention import PackedAttention
    from text_generation_shard.device.cpu.kernels.linear import weights_marker
    from text_generation_shard.device.cpu.kernels.vector import INT4, INT8, marker

    assert isinstance(backend, PackedAttention)
    rows, weights = marker(dtype), weights_marker(dtype)
    kind = {None: weights, "int8": INT8, "int4": INT4}.get(quantize)
    head_kind = weights if quantize is None else INT8
    fields = [layer.fields(kind) for layer in layers]
    if any(item is None for item in fields):
        return None
    if ends.head is None or type(ends.head.kind) is not type(head_kind):
        ends = ends._replace(head=None)
    known = [item for item in fields if item is not None]
    return CompiledLayers(known, ends, (kind, head_kind, rows), config, backend)


class CompiledLayers:
    """Runs layers whose weights others own. Owns their addresses, the buffers of a pass and the
    board of the threads that go through it: of one pass at a time."""

    def __init__(
        self,
        fields: Sequence[dict[str, int]],
        ends: Ends,
        kinds: tuple[Any, Any, Any],
        config: ModelConfig,
        backend: "PackedAttention",
    ) -> None:
        """`fields` of each layer, all with weights of one kind; kinds: markers of that, of the
        head's weights and of rows."""
        from numba import config as numba_config
        from numba import typeof

        from text_generation_shard.device.cpu.kernels import layers
        from text_generation_shard.device.cpu.kernels.thread_pool import board_words
        from text_generation_shard.device.cpu.kernels.vector import aligned

        self._run, self._given = layers.run_layers, layers.Given
        self._backend, self._kinds, self._vocab_size = backend, kinds, config.vocab_size
        self.has_embedding, self.has_head = bool(ends.embedding), ends.head is not None
        self._layers = np.zeros(len(fields), layers.LAYER)
        for place, layer in enumerate(fields):
            for name in layers.FIELDS:
                self._layers[place][name] = layer.get(name, 0)
        names = "qkv", "out", "gate_up", "down"
        self.regions = [(item[name], item[f"{name}_bytes"]) for item in fields for name in names]
        """Of the weights that every pass reads: addresses and bytes."""
        if ends.head is not None:
            self.regions.append((ends.head.weight, ends.head.nbytes))
        self._board = aligned(board_words(numba_config.NUMBA_NUM_THREADS), torch.int64)
        self._pass = np.zeros(1, layers.PASS)
        # As much as the largest pass so far took; kept, so that a step allocates nothing.
        self._memory = np.empty(0, dtype=np.uint8)
        size, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
        half = config.rope.rotary_dim // 2
        sizes = size, config.intermediate_size, heads, kv_heads, config.head_dim, half
        head = (0, 0) if ends.head is None else (ends.head.weight, ends.head.scales)
        others = self._board.data_ptr(), ends.embedding, *head, ends.norm, config.vocab_size
        scales = config.attention_scale, config.norm_eps, config.residual_multiplier
        constants = config.embedding_multiplier, *scales
        fixed: dict[str, float] = {}
        fixed |= layers.codes(*(typeof(marker) for marker in kinds))
        fixed |= dict(zip(layers.SIZES, sizes, strict=True))
        fixed |= dict(zip(layers.OTHERS, others, strict=True))
        fixed |= dict(zip(layers.CONSTANTS, constants, strict=True))
        for name, value in fixed.items():
            self._pass[name] = value

    def plan_rows(self, batch: RowBatch, angles: Tensor) -> Tokens:
        """The tokens [R], turned by the angles of their positions."""
        input_ids, plan = self._backend.plan_rows(batch)
        return Tokens(input_ids, angles, batch.starts, plan)

    def forward(self, tokens: Tokens, hidden: Tensor) -> None:
        """hidden [T, hidden_size] goes through all layers in place; if the layers have the
        embedding, it begins as anything. Tokens that the plan does not want end as anything."""
        self._compute(tokens, hidden, _NO_LOGITS)

    def logits(self, tokens: Tokens, hidden: Tensor | None) -> Floats:
        """What the head makes of the S tokens that the plan wants: [S, vocab_size] in float32. Only
        if the layers have it. hidden as in `forward`; None, only if they have the embedding: nobody
        asks for it."""
        num_wanted = len(cast("PackedPlan", tokens.plan).wanted)
        logits: Floats = np.empty((num_wanted, self._vocab_size), dtype=np.float32)
        self._compute(tokens, hidden, logits)
        return logits

    def _compute(self, tokens: Tokens, hidden: Tensor | None, logits: Any) -> None:
        # Nobody else makes plans here; to ask takes longer than to know.
        cache, plan = self._backend.cache, cast("PackedPlan", tokens.plan)
        assert cache is not None and (hidden is None or hidden.is_contiguous())
        given = self._given(
            *self._kinds,
            self._pass,
            self._layers,
            0 if hidden is None else hidden.data_ptr(),
            tokens.angles.data_ptr(),
            *cache.place,
            tokens.input_ids,
            tokens.positions,
            plan.slots,
            plan.block_tables,
            plan.tasks,
            plan.wanted,
            plan.last_tasks,
            logits,
        )
        needed = self._run(given, self._memory, plan.num_threads)
        if needed > len(self._memory):
            self._memory = np.empty(0, dtype=np.uint8)
            self._memory = np.empty(needed, dtype=np.uint8)
            self._run(given, self._memory, plan.num_threads)


_NO_LOGITS = np.empty((0, 0), dtype=np.float32)
