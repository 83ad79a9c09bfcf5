"""The usual attention module of transformers in one piece: one product for queries, keys and
values, and our rotation, instead of about forty operations of torch."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from text_generation_shard.models.hugging_face.attention import Call, Interface, Paged
from text_generation_shard.models.hugging_face.products import Product, plus

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


class Recording:
    """A handler that keeps the heads of one call, and whose result is the values."""

    def __init__(self) -> None:
        self.heads: tuple[Tensor, Tensor, Tensor] | None = None
        self.result = torch.empty(0)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: Call
    ) -> Tensor:
        """See Handler."""
        self.heads = query, key, value
        repeated = value.repeat_interleave(call.num_heads // call.num_kv_heads, dim=1)
        self.result = repeated.transpose(1, 2).contiguous()
        return self.result


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
        recording = Recording()
        with self._interface.handled_by(recording):
            out = self._forward(hidden, position_embeddings=(cos, sin), attention_mask=None)[0]
        if recording.heads is None:
            return False
        theirs = torch.cat(recording.heads, dim=1)[0].transpose(0, 1)
        ours = self.heads(hidden[0])
        rotated = ours[:, : -self._counts[2], :num_rotated].float()
        first, last = rotated.chunk(2, dim=-1)
        turned = torch.cat((-last, first), dim=-1)
        rotated = rotated * cos[0, :, None].float() + turned * sin[0, :, None].float()
        ours[:, : -self._counts[2], :num_rotated] = rotated.to(ours.dtype)
        result = self._module.o_proj(recording.result.flatten(2))
        return _is_close(ours, theirs) and _is_close(result, out)


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    limit = _STEPS * torch.finfo(theirs.dtype).eps * theirs.abs().max().float()
    return bool((ours.float() - theirs.float()).abs().max() <= limit)


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
    names = [*inspect.signature(type(module).forward).parameters][:3]
    return (
        query.matrix is key.matrix is value.matrix
        and set(code.co_names) <= _USUAL
        and names == ["self", "hidden_states", "position_embeddings"]
    )
