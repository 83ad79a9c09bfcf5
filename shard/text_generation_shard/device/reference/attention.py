"""The reference attention: plain torch on any device. The specification of the faster ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_shard.device.base import (
    Angles,
    AttentionPlan,
    CacheShape,
    ForwardBatch,
    Scoring,
)


class KVCache:
    """Owns one tensor [layers, 2, kv_heads, blocks, block_size, head_dim].

    Heads come before blocks, so that the gathered blocks of one head form a contiguous [context,
    head_dim] matrix.
    """

    def __init__(
        self, shape: CacheShape, num_blocks: int, make_zeros: Callable[[int, int, int], Tensor]
    ) -> None:
        """`make_zeros(parts, blocks per part, bytes per block)` returns zeros in uint8."""
        self.shape = shape
        self.num_blocks = num_blocks
        self.nbytes = shape.block_bytes * num_blocks
        count = 2 * shape.num_layers * shape.num_kv_heads
        zeros = make_zeros(count, num_blocks, shape.block_bytes // count)
        # By layer: keys and values [2 * kv_heads, blocks, block_size, head_dim].
        self._layers = zeros.view(shape.dtype).view(
            shape.num_layers, -1, num_blocks, shape.block_size, shape.head_dim
        )

    def store(self, layer: int, slots: Tensor, key_value: Tensor) -> None:
        """Write key_value [T, 2 * kv_heads, head_dim], keys first, at `slots` [T]. Values that are
        not finite are written as 0, as by other devices: there a masked slot is multiplied by 0."""
        finite = key_value.transpose(0, 1).nan_to_num(0.0, 0.0, 0.0)
        self._layers[layer].flatten(1, 2).index_copy_(1, slots.long(), finite)

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, len(blocks) * block_size, head_dim] of `blocks`."""
        gathered = self._layers[layer].index_select(1, blocks).flatten(1, 2)
        keys, values = gathered.chunk(2)
        return keys, values


class TorchRotation:
    """Rotates the heads of T tokens. Holds each angle twice, the first half of the sines negated,
    so that a rotation takes three operators."""

    def __init__(self, angles: Angles, dtype: torch.dtype) -> None:
        cos, sin = angles.table[angles.rows].unbind(dim=1)
        # [T, 1, rotary_dim]
        self._cos = torch.cat((cos, cos), dim=-1)[:, None].to(dtype)
        self._sin = torch.cat((-sin, sin), dim=-1)[:, None].to(dtype)

    def rotate_(self, heads: Tensor, num_rotated: int, num_queries: int, scale: float) -> None:
        """Rotate the first `num_rotated` heads of [T, n, head_dim] in place: feature i with feature
        i + half. The first `num_queries` heads are multiplied by `scale`."""
        rotary_dim = self._cos.shape[-1]
        rotated = heads[:, :num_rotated, :rotary_dim]
        swapped = rotated.roll(rotary_dim // 2, dims=-1)
        torch.addcmul(rotated * self._cos, swapped, self._sin, out=rotated)
        heads[:, :num_queries].mul_(scale)


# Most cached tokens of a row.
_MOST_TOKENS = 1 << 17


@dataclass(slots=True)
class TorchPlan:
    """The inputs of one pass."""

    batch: ForwardBatch
    rotation: TorchRotation
    # Masks by (row, window); shared by all layers.
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)


class TorchAttention:
    """One call of torch's attention per row."""

    name = "torch"
    block_size = 16
    is_deterministic = False
    heaviest_keys: int | None = None

    def __init__(
        self,
        scale: float,
        make_zeros: Callable[[int, int, int], Tensor],
        scorings: Sequence[Scoring | None] = (),
    ) -> None:
        """Queries are multiplied by `scale`. `make_zeros`: see KVCache. scorings: see Device."""
        self._scale, self._make_zeros = scale, make_zeros
        self._scorings = scorings
        self._cache: KVCache | None = None

    def workspace_bytes(self, shape: CacheShape) -> int:
        """See Attention."""
        return 2 * _MOST_TOKENS * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize

    def allocate(self, shape: CacheShape, num_blocks: int) -> int:
        """See Attention."""
        self._cache = None
        self._cache = KVCache(shape, num_blocks, self._make_zeros)
        return self._cache.nbytes

    def plan(self, batch: ForwardBatch, angles: Angles) -> TorchPlan:
        """See Attention."""
        assert self._cache is not None, "allocate comes before plan"
        return TorchPlan(batch, TorchRotation(angles, self._cache.shape.dtype))

    def forward(
        self, heads: Tensor, layer: int, window: int | None, is_rotated: bool, plan: AttentionPlan
    ) -> Tensor:
        """See Attention."""
        assert self._cache is not None and isinstance(plan, TorchPlan)
        num_kv_heads = self._cache.shape.num_kv_heads
        query, key_value = heads.tensor_split((-2 * num_kv_heads,), dim=1)
        num_heads = query.shape[1]
        if is_rotated:
            # Queries and keys have the same angles: one call rotates both.
            plan.rotation.rotate_(heads, num_heads + num_kv_heads, num_heads, self._scale)
        else:
            query.mul_(self._scale)
        self._cache.store(layer, plan.batch.slots, key_value)
        out = torch.empty_like(query).flatten(1)
        for row, (start, end) in enumerate(pairwise(plan.batch.cu_seqlens_q)):
            out[start:end] = self._row(self._cache, query[start:end], layer, window, plan, row)
        return out

    def _row(
        self,
        cache: KVCache,
        query: Tensor,
        layer: int,
        window: int | None,
        plan: TorchPlan,
        row: int,
    ) -> Tensor:
        """query [length, heads, head_dim] of one row → [length, heads * head_dim]."""
        batch, length = plan.batch, len(query)
        context = batch.host_context_lens[row]
        blocks = batch.block_tables[row, : -(-context // self.block_size)]
        keys, values = (part[:, :context] for part in cache.gather(layer, blocks))
        scoring = self._scorings[layer] if self._scorings else None
        is_causal, mask = context == length > 1 and (window is None or context <= window), None
        needs_mask = not is_causal or scoring is not None
        if needs_mask and (mask := plan.masks.get((row, window))) is None:
            start = batch.cu_seqlens_q[row]
            mask = _mask(batch.positions[start : start + length], context, window, query.dtype)
            plan.masks[row, window] = mask
        if scoring is not None:
            assert mask is not None
            return _attended(query, keys, values, mask, scoring)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=is_causal,
            scale=1.0,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1).flatten(1)


def _attended(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Scoring
) -> Tensor:
    """query [length, heads, head_dim], keys and values [kv_heads, context, head_dim], mask [length,
    context] → [length, heads * head_dim]; the softmax is computed in float32."""
    length, heads, head_dim = query.shape
    # By KV head: the queries of its group, one query head after another.
    grouped = query.transpose(0, 1).reshape(len(keys), -1, head_dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2)).float().view(heads, length, -1)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores + mask
    if scoring.sinks is not None:
        sinks = scoring.sinks.float().view(heads, 1, 1).expand(heads, length, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]].to(values.dtype)
    attended = torch.bmm(weights.view(len(keys), -1, keys.shape[1]), values)
    return attended.view(heads, length, head_dim).transpose(0, 1).flatten(1)


def _mask(positions: Tensor, context: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where a token is seen by those at `positions` [length], else -inf: [length, context] in the
    dtype of the queries, because SDPA converts a bool mask in every layer. In a recorded pass,
    `context` is the longest."""
    last, token = positions[:, None], torch.arange(context, device=positions.device)[None]
    hidden = token > last
    if window is not None:
        hidden = hidden | (token <= last - window)
    seen = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return seen.masked_fill(hidden, float("-inf"))
