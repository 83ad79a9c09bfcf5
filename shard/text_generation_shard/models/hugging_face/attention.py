"""Attention of a transformers model over our paged cache.

transformers' modules call a function by name (`AttentionInterface`). Each model here registers one
under a name of its own. A pass is one sequence [1, T] of all rows without padding, or with
recurrent layers rows of one token [R, 1]. Under a name without a mask function, transformers makes
no masks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from text_generation_shard.device.forward import (
    Angles,
    Attention,
    AttentionPlan,
    CacheShape,
    ForwardBatch,
    Scoring,
)
from text_generation_shard.device.reference.device import Device
from text_generation_shard.errors import UnsupportedError

# Arguments that change nothing here. Another one that is not None would mean an attention that is
# not computed.
_WITHOUT_EFFECT = frozenset(
    {
        "cache",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
# Cached heads have a multiple of this many features, as kernels take them.
_FEATURES = 16


class Call(NamedTuple):
    """What a layer wants of its attention."""

    num_heads: int
    num_kv_heads: int
    # Features of queries and keys, and of values.
    head_dim: int
    value_dim: int
    # Queries are multiplied by this.
    scale: float
    window: int | None
    scoring: Scoring | None

    @property
    def size(self) -> int:
        """Features of a cached head: keys and values have the same number."""
        return -(-max(self.head_dim, self.value_dim) // _FEATURES) * _FEATURES


class Handler(Protocol):
    """Computes the attention of a pass."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: Call
    ) -> Tensor:
        """Heads [R, n, T, features] → [R, T, num_heads, value_dim]."""


_numbers = count()


class Interface:
    """The function that a model's modules call, and the handler of the pass under way."""

    def __init__(self) -> None:
        self.name = f"pytgi_{next(_numbers)}"
        # With masks that tell their window, see `_marked`.
        self.probing_name = f"{self.name}_probe"
        # Of the pass under way.
        self.handler: Handler | None = None
        for name in (self.name, self.probing_name):
            AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(self.probing_name, _marked)

    @contextmanager
    def handled_by(self, handler: Handler) -> Iterator[None]:
        """Calls inside go to this handler."""
        self.handler = handler
        try:
            yield
        finally:
            self.handler = None

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        """See AttentionInterface. s_aux: a score of each head beside those of its keys."""
        unknown = [name for name in given if name not in _WITHOUT_EFFECT]
        if found := [name for name in unknown if given[name] is not None]:
            raise UnsupportedError(
                f"{type(module).__name__} gives its attention {', '.join(sorted(found))}, which is "
                "not supported"
            )
        assert self.handler is not None, "a handler computes every pass"
        scoring = None if softcap is None and s_aux is None else Scoring(softcap, s_aux)
        sizes = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        call = Call(*sizes, scale, sliding_window, scoring)
        layer: int = module.layer_idx  # type: ignore[assignment]
        return self.handler.attend(layer, query, key, value, attention_mask, call), None


def _marked(
    *_: Any, local_size: int | None = None, device: torch.device | None = None, **__: Any
) -> Tensor:
    """A mask [1, 1, 1, 1] that holds its window; 0: none."""
    return torch.full((1, 1, 1, 1), float(local_size or 0), device=device)


class Probe:
    """Records what each layer wants, in a pass of one token: its attention is its value."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: Call
    ) -> Tensor:
        """See Handler."""
        if layer in self.calls:
            raise UnsupportedError(f"layer {layer} attends twice in a pass, which is not supported")
        # The mask is what transformers' own attention obeys; the argument is for other ones.
        window = int(mask.reshape(-1)[0]) if mask is not None else call.window
        self.calls[layer] = call._replace(window=window or None)
        return value.repeat_interleave(call.num_heads // call.num_kv_heads, dim=1).transpose(1, 2)


class Paged:
    """Attention over our cache, for one pass."""

    def __init__(self, attention: "LayeredAttention", batch: ForwardBatch) -> None:
        self._attention, self._batch = attention, batch
        # By the sines and cosines of its rotation; 0: without.
        self._plans: dict[int, list[AttentionPlan]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: Call
    ) -> Tensor:
        """See Handler."""
        if (plan := self._plans.get(0)) is None:
            plan = self._plans[0] = self._attention.plan(self._batch, self._attention.no_angles)
        return self._attention.attend(layer, (query, key, value), plan)

    def attend_rotated(
        self, layer: int, heads: Tensor, embeddings: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Rotates queries and keys of heads [T, n, head_dim] first, by cosines and sines
        [1, T, rotary_dim] that live as long as the pass; returns [T, num_heads * head_dim]."""
        if (plan := self._plans.get(id(embeddings))) is None:
            half = embeddings[0].shape[-1] // 2
            table = torch.stack([part[0, :, :half] for part in embeddings], dim=1).float()
            angles = Angles(table, torch.arange(len(table), device=table.device))
            plan = self._plans[id(embeddings)] = self._attention.plan(self._batch, angles)
        return self._attention.attend_rotated(layer, heads, plan)


class _Kind(NamedTuple):
    """Heads of some layers."""

    num_heads: int
    num_kv_heads: int
    size: int
    scale: float
    has_scoring: bool


class LayeredAttention:
    """Attention of layers with heads of several kinds: one cache for each kind, and the same block
    numbers in all."""

    def __init__(self, device: Device, calls: Mapping[int, Call]) -> None:
        """calls: by layer; other layers do not attend."""
        self._device, self._calls = device, calls
        kinds = {
            layer: _Kind(
                call.num_heads, call.num_kv_heads, call.size, call.scale, call.scoring is not None
            )
            for layer, call in calls.items()
        }
        self._kinds = sorted(set(kinds.values())) or [_Kind(1, 1, _FEATURES, 1.0, False)]
        self._own: list[Attention] = []
        # Of each layer: its kind, and which layer of that kind it is.
        self._places: dict[int, tuple[int, int]] = {}
        for number, kind in enumerate(self._kinds):
            layers = [layer for layer in calls if kinds[layer] == kind]
            self._places |= {layer: (number, place) for place, layer in enumerate(layers)}
            scorings = [calls[layer].scoring for layer in layers] if kind.has_scoring else []
            self._own.append(device.attention(*kind[:4], scorings))
        first = self._own[0]
        self.name, self.block_size = first.name, first.block_size
        self.heaviest_keys = first.heaviest_keys
        self.is_deterministic = all(own.is_deterministic for own in self._own)
        # Nothing is rotated here.
        here = device.torch_device
        self.no_angles = Angles(
            torch.zeros(1, 2, _FEATURES // 2, device=here),
            torch.zeros(1, dtype=torch.int64, device=here),
        )

    @property
    def windows(self) -> list[int | None]:
        """Of each layer that attends."""
        return [call.window for call in self._calls.values()]

    @property
    def widest(self) -> int:
        """Features of a token's queries, keys, values and result, in one layer."""
        return max(2 * (kind.num_heads + kind.num_kv_heads) * kind.size for kind in self._kinds)

    @property
    def cache_shape(self) -> CacheShape:
        """Of all layers."""
        counts = [0] * len(self._kinds)
        for number, _ in self._places.values():
            counts[number] += 1
        first, *others = (
            CacheShape(
                max(num_layers, 1),
                kind.num_kv_heads,
                kind.size,
                self.block_size,
                self._device.cache_dtype,
            )
            for kind, num_layers in zip(self._kinds, counts, strict=True)
        )
        return replace(first, others=tuple(others))

    def workspace_bytes(self, shape: CacheShape) -> int:
        """See Attention."""
        pairs = zip(self._own, (shape, *shape.others), strict=True)
        return max(own.workspace_bytes(one) for own, one in pairs)

    def allocate(self, shape: CacheShape, num_blocks: int) -> int:
        """See Attention."""
        pairs = zip(self._own, (shape, *shape.others), strict=True)
        return sum(own.allocate(one, num_blocks) for own, one in pairs)

    def plan(self, batch: ForwardBatch, angles: Angles) -> list[AttentionPlan]:
        """See Attention."""
        return [own.plan(batch, angles) for own in self._own]

    def forward(
        self, heads: Tensor, layer: int, window: int | None, is_rotated: bool, plan: AttentionPlan
    ) -> Tensor:
        """Not called: transformers' modules call `attend`."""
        raise AssertionError("the modules of transformers call `attend`")

    def attend_rotated(self, layer: int, heads: Tensor, plan: Sequence[AttentionPlan]) -> Tensor:
        """See Paged."""
        number, place = self._places[layer]
        window = self._calls[layer].window
        return self._own[number].forward(heads, place, window, True, plan[number])

    def attend(self, layer: int, heads: Sequence[Tensor], plan: Sequence[AttentionPlan]) -> Tensor:
        """See Handler. heads: queries, keys and values."""
        number, place = self._places[layer]
        size, value_dim = self._kinds[number].size, heads[2].shape[3]
        parts = [part.transpose(1, 2) for part in heads]
        if any(part.shape[3] != size for part in parts):
            parts = [nn.functional.pad(part, (0, size - part.shape[3])) for part in parts]
        # [R, T, n, size]: one row of all tokens, or rows of one token.
        joined = torch.cat(parts, dim=2)
        window = self._calls[layer].window
        out = self._own[number].forward(joined.flatten(0, 1), place, window, False, plan[number])
        out = out.view(*joined.shape[:2], heads[0].shape[1], size)
        return out if value_dim == size else out[..., :value_dim]
