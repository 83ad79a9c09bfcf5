"""Attention of a transformers model over our paged cache.

transformers' modules call a function by name (`AttentionInterface`). Each model here registers one
under a name of its own. A pass is one sequence [1, T] of all rows without padding, or with
recurrent layers rows of one token [R, 1]. Under a name without a mask function, transformers makes
no masks.

The usual attention module is computed in one piece: one product for queries, keys and values, and
our rotation, instead of about forty operations of torch.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from text_generation_shard.device.base import (
    Angles,
    Attention,
    AttentionPlan,
    CacheShape,
    ForwardBatch,
    Scoring,
)
from text_generation_shard.device.reference.device import Device
from text_generation_shard.errors import UnsupportedError
from text_generation_shard.models.hugging_face.products import Product, is_close, plus

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
_HEADS = ("q_proj", "k_proj", "v_proj")
# What the usual forward reads. One that reads more may depend on more than a few tokens show.
_USUAL = frozenset(
    {
        *("shape", "head_dim", "view", "transpose", "reshape", "contiguous", *_HEADS, "o_proj"),
        *("q_norm", "k_norm", "apply_rotary_pos_emb", "update", "layer_idx", "config"),
        *("get_interface", "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward", "Callable"),
        *("_attn_implementation", "scaling", "getattr", "sliding_window", "attn_logit_softcapping"),
        *("sinks", "use_rope", "use_qk_norm", "training", "attention_dropout", "residual_dropout"),
        *("nn", "functional", "dropout"),
    }
)
# Largest difference, as a share of the largest number, in steps of its dtype.
_STEPS = 16
# Tokens and seed of the random input of the comparison.
_TOKENS = 3


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

    @property
    def kind(self) -> "_Kind":
        """Layers of one kind have one cache."""
        has_scoring = self.scoring is not None
        return _Kind(self.num_heads, self.num_kv_heads, self.size, self.scale, has_scoring)


_numbers = count()


class Interface:
    """The function that a model's modules call, and the handler of the pass under way."""

    def __init__(self) -> None:
        self.name = f"pytgi_{next(_numbers)}"
        # With masks that tell their window, see `_marked`.
        self.probing_name = f"{self.name}_probe"
        # Computes the attention of the pass under way.
        self.handler: Probe | Paged | None = None
        for name in (self.name, self.probing_name):
            AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(self.probing_name, _marked)

    @contextmanager
    def handled_by(self, handler: "Probe | Paged") -> Iterator[None]:
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
        return self.handler.attend(layer, (query, key, value), attention_mask, call), None


def _marked(
    *_: Any, local_size: int | None = None, device: torch.device | None = None, **__: Any
) -> Tensor:
    """A mask [1, 1, 1, 1] that holds its window; 0: none."""
    return torch.full((1, 1, 1, 1), float(local_size or 0), device=device)


class Probe:
    """Records what each layer wants, in a pass in which the attention of a token is its value."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        # Of the last call: queries, keys and values, and the result.
        self.heads: tuple[Tensor, ...] = ()
        self.result = torch.empty(0)

    def attend(
        self, layer: int, heads: tuple[Tensor, ...], mask: Tensor | None, call: Call
    ) -> Tensor:
        """Heads [R, n, T, features] → [R, T, num_heads, value_dim]."""
        if layer in self.calls:
            raise UnsupportedError(f"layer {layer} attends twice in a pass, which is not supported")
        # The mask is what transformers' own attention obeys; the argument is for other ones.
        window = int(mask.reshape(-1)[0]) if mask is not None else call.window
        self.calls[layer], self.heads = call._replace(window=window or None), heads
        repeated = heads[2].repeat_interleave(call.num_heads // call.num_kv_heads, dim=1)
        self.result = repeated.transpose(1, 2).contiguous()
        return self.result


class Paged:
    """Attention over our cache, for one pass."""

    def __init__(self, attention: "LayeredAttention", batch: ForwardBatch) -> None:
        self._attention, self._batch = attention, batch
        # By the sines and cosines of its rotation; 0: without.
        # They are kept, so that no others get their number.
        self._plans: dict[int, list[AttentionPlan]] = {}
        self._embeddings: list[tuple[Tensor, Tensor]] = []

    def attend(
        self, layer: int, heads: tuple[Tensor, ...], mask: Tensor | None, call: Call
    ) -> Tensor:
        """See Probe."""
        if (plan := self._plans.get(0)) is None:
            plan = self._plans[0] = self._attention.plan(self._batch, self._attention.no_angles)
        parts = [part.transpose(1, 2) for part in heads]
        if any(part.shape[3] != call.size for part in parts):
            parts = [nn.functional.pad(part, (0, call.size - part.shape[3])) for part in parts]
        # [R, T, n, size]: one row of all tokens, or rows of one token.
        joined = torch.cat(parts, dim=2)
        window = self._attention.calls[layer].window
        out = self._attention.forward(joined.flatten(0, 1), layer, window, False, plan)
        out = out.view(*joined.shape[:2], call.num_heads, call.size)
        return out if call.value_dim == call.size else out[..., : call.value_dim]

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
            self._embeddings.append(embeddings)
        window = self._attention.calls[layer].window
        return self._attention.forward(heads, layer, window, True, plan)


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
        self.calls = calls
        layers: dict[_Kind, list[int]] = defaultdict(list)
        for layer, call in calls.items():
            layers[call.kind].append(layer)
        self._kinds = sorted(layers) or [_Kind(1, 1, _FEATURES, 1.0, False)]
        self._own: list[Attention] = []
        # Of each layer: its kind, and which layer of that kind it is.
        self._places: dict[int, tuple[int, int]] = {}
        for number, kind in enumerate(self._kinds):
            for place, layer in enumerate(layers[kind]):
                self._places[layer] = number, place
            scorings = [calls[layer].scoring for layer in layers[kind] if kind.has_scoring]
            self._own.append(device.attention(*kind[:4], scorings))
        own = self._own[0]
        self.name, self.block_size, self.heaviest_keys = own.name, own.block_size, own.heaviest_keys
        self.is_deterministic = all(own.is_deterministic for own in self._own)
        first, *others = (
            CacheShape(
                num_layers=max(len(layers[kind]), 1),
                num_kv_heads=kind.num_kv_heads,
                head_dim=kind.size,
                block_size=self.block_size,
                dtype=device.cache_dtype,
            )
            for kind in self._kinds
        )
        self.cache_shape = replace(first, others=tuple(others))
        """Of all layers."""
        # Nothing is rotated here.
        here = device.torch_device
        self.no_angles = Angles(
            torch.zeros(1, 2, _FEATURES // 2, device=here),
            torch.zeros(1, dtype=torch.int64, device=here),
        )

    @property
    def widest(self) -> int:
        """Features of a token's queries, keys, values and result, in one layer."""
        return max(2 * (kind.num_heads + kind.num_kv_heads) * kind.size for kind in self._kinds)

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
        """See Attention."""
        assert isinstance(plan, list), "`plan` makes one of each kind"
        number, place = self._places[layer]
        return self._own[number].forward(heads, place, window, is_rotated, plan[number])


# What it may be given beside its input, which the attention of our cache does not need.
_PARAMETERS = frozenset(
    {"attention_mask", "cache", "past_key_values", "position_ids", "cache_position", "kwargs"}
)


class UsualAttention:
    """The forward of an attention module whose heads are `rotated(normed(product))`."""

    def __init__(self, module: Any, call: Call, interface: Interface) -> None:
        self._module, self._interface = module, interface
        self._forward = module.forward
        products = [getattr(module, name) for name in _HEADS]
        self._matrix = products[0].matrix
        biases = [product.bias for product in products]
        self._bias = None if biases[0] is None else torch.cat(biases)
        self._norms = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
        self._counts = call.num_heads, call.num_kv_heads, call.num_kv_heads

    def heads(self, hidden: Tensor) -> Tensor:
        """[T, size] → [T, queries + keys + values, head_dim], not rotated."""
        found: Tensor = self._matrix(hidden.contiguous(), self._bias)
        found = found.view(len(hidden), sum(self._counts), -1)
        query_norm, key_norm = self._norms
        if query_norm is None or key_norm is None:
            return found
        query, key, value = found.tensor_split((self._counts[0], -self._counts[2]), dim=1)
        return torch.cat((query_norm(query), key_norm(key), value), dim=1)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        *others: Any,
        **given: Any,
    ) -> tuple[Tensor, Any]:
        """See the module's own forward, which computes all but passes over our cache."""
        handler = self._interface.handler
        if not isinstance(handler, Paged) or len(hidden_states) > 1 or position_embeddings is None:
            found: tuple[Tensor, Any] = self._forward(
                hidden_states, position_embeddings, *others, **given
            )
            return found
        heads = self.heads(hidden_states[0])
        out = handler.attend_rotated(self._module.layer_idx, heads, position_embeddings)
        return self._module.o_proj(out[None]), None

    def is_same(self, num_rotated: int) -> bool:
        """Whether the module's own forward attends with these heads, `num_rotated` features of each
        rotated, and multiplies the result with `o_proj` only. Tried with a random input."""
        weight = self._module.o_proj.weight
        generator = torch.Generator().manual_seed(0)

        def random(size: int) -> Tensor:
            found = torch.randn(1, _TOKENS, size, generator=generator)
            return found.to(weight.device, weight.dtype)

        hidden = random(self._module.q_proj.in_features)
        cos, sin = (
            torch.cat((half, half), -1) for half in (random(num_rotated // 2) for _ in "cs")
        )
        probe = Probe()
        with self._interface.handled_by(probe):
            out = self._forward(hidden, position_embeddings=(cos, sin), attention_mask=None)[0]
        if not probe.heads:
            return False
        theirs = torch.cat(probe.heads, dim=1)[0].transpose(0, 1)
        ours = self.heads(hidden[0])
        rotated = ours[:, : -self._counts[2], :num_rotated].float()
        first, last = rotated.chunk(2, dim=-1)
        turned = torch.cat((-last, first), dim=-1)
        rotated = rotated * cos[0, :, None].float() + turned * sin[0, :, None].float()
        ours[:, : -self._counts[2], :num_rotated] = rotated.to(ours.dtype)
        result = self._module.o_proj(probe.result.flatten(2))
        ends = self._counts[0], -self._counts[2]
        # Each by its own largest number: keys may be far larger than values.
        pairs = zip(ours.tensor_split(ends, 1), theirs.tensor_split(ends, 1), strict=True)
        are_same = ours.shape == theirs.shape and all(is_close(*pair, _STEPS) for pair in pairs)
        return are_same and is_close(result, out, _STEPS)


@contextmanager
def noted_rotations(model: nn.Module) -> Iterator[dict[nn.Module, int]]:
    """Inside, notes how many features of a head the passes give each attention module to rotate."""
    found: dict[nn.Module, int] = {}

    def note(module: nn.Module, _: Any, given: dict[str, Any]) -> None:
        embeddings = given.get("position_embeddings")
        if isinstance(embeddings, tuple) and len(embeddings) == 2:
            found[module] = embeddings[0].shape[-1]

    candidates = [module for module in model.modules() if _may_be_usual(module)]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in candidates]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _may_be_usual(module: Any) -> bool:
    found = [getattr(module, name, None) for name in (*_HEADS, "o_proj")]
    products = [one for one in found if isinstance(one, Product) and one.finish is plus]
    if len(products) < len(found):
        return False
    query, key, value, _ = products
    code = inspect.unwrap(type(module).forward).__code__
    # Names by which attributes are asked for; functions inside are not looked into.
    constants = {one for one in code.co_consts if isinstance(one, str) and one.isidentifier()}
    parameters = [*inspect.signature(type(module).forward).parameters]
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    weights = [weight for norm in norms if (weight := getattr(norm, "weight", None)) is not None]
    return (
        query.matrix is key.matrix is value.matrix
        and {*code.co_names, *constants} <= _USUAL
        and not any(inspect.iscode(one) for one in code.co_consts)
        and parameters[:3] == ["self", "hidden_states", "position_embeddings"]
        and set(parameters[3:]) <= _PARAMETERS
        and len({one.bias is None for one in (query, key, value)}) == 1
        and all(weight.shape == (module.head_dim,) for weight in weights)
    )
