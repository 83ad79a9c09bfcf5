"""The reference attention: plain torch, any device, the specification of every faster one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_shard.attention.base import MAX_GATHER_TOKENS, AttentionPlan
from text_generation_shard.forward import ForwardBatch
from text_generation_shard.kv_cache import CacheShape, KVCache


@dataclass(slots=True)
class RowGroup:
    """Decode rows of similar length. `rows` is None for all rows of the batch."""

    rows: Tensor | None
    context_lens: Tensor
    block_index: Tensor
    # By window size; the same in all layers.
    masks: dict[int | None, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class TorchPlan:
    """Indices into the cache for one pass."""

    batch: ForwardBatch
    slot_index: Tensor
    groups: list[RowGroup]
    # Masks of continued prompts by (row, window).
    prefill_masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)


class TorchAttention:
    """Decode: two batched matrix products over (kv head × row). Prefill: one SDPA call a row.

    The batched products beat SDPA in decode because the query heads that share a KV head become
    the rows of one matrix, so each block is read once for all of them (measured in
    MEASUREMENTS: 0.20 against 0.35 ms a layer at 32 rows).
    """

    name = "torch"
    block_size = 16

    def __init__(self) -> None:
        self._cache: KVCache | None = None

    def allocate(self, shape: CacheShape, num_blocks: int, device: torch.device) -> KVCache:
        """See AttentionBackend."""
        self._cache = None
        self._cache = KVCache(shape, num_blocks, device)
        return self._cache

    def plan(self, batch: ForwardBatch) -> TorchPlan:
        """See AttentionBackend."""
        assert self._cache is not None, "allocate comes before plan"
        groups = self._groups(self._cache, batch) if batch.is_decode else []
        return TorchPlan(batch, self._cache.slot_index(batch.slots), groups)

    def _groups(self, cache: KVCache, batch: ForwardBatch) -> list[RowGroup]:
        """Rows are padded to the longest of their group only: one long row beside 31 short ones
        cost 132 ms a layer in one group, and 1.7 ms in two."""
        groups = []
        for rows in group_by_length(batch.host_context_lens):
            index = None
            tables, lens = batch.block_tables, batch.context_lens
            if len(rows) < len(batch.host_context_lens):
                index = torch.tensor(rows, device=tables.device)
                tables, lens = tables[index], lens[index]
            width = -(-max(batch.host_context_lens[row] for row in rows) // self.block_size)
            blocks = cache.block_index(tables[:, :width].flatten())
            groups.append(RowGroup(index, lens, blocks))
        return groups

    def forward(
        self,
        query: Tensor,
        key_value: Tensor,
        layer: int,
        window: int | None,
        plan: AttentionPlan,
    ) -> Tensor:
        """See AttentionBackend."""
        assert self._cache is not None and isinstance(plan, TorchPlan)
        self._cache.store(layer, plan.slot_index, key_value)
        if plan.batch.is_decode:
            return self._decode(self._cache, query, layer, window, plan)
        return self._prefill(self._cache, query, key_value, layer, window, plan)

    def _decode(
        self, cache: KVCache, query: Tensor, layer: int, window: int | None, plan: TorchPlan
    ) -> Tensor:
        rows, heads, head_dim = query.shape
        if len(plan.groups) == 1:
            return self._decode_group(cache, query, layer, window, plan.groups[0])
        out = torch.empty(rows, heads * head_dim, dtype=query.dtype, device=query.device)
        for group in plan.groups:
            assert group.rows is not None, "only a single group holds all rows"
            out[group.rows] = self._decode_group(cache, query[group.rows], layer, window, group)
        return out

    def _decode_group(
        self, cache: KVCache, query: Tensor, layer: int, window: int | None, group: RowGroup
    ) -> Tensor:
        rows, heads, head_dim = query.shape
        kv_heads = cache.shape.num_kv_heads
        # keys, values: [kv_heads * rows, context, head_dim], context padded to the longest row.
        keys, values = cache.gather(layer, group.block_index, rows)
        if window not in group.masks:
            mask = _decode_mask(group.context_lens, keys.shape[1], kv_heads, window)
            group.masks[window] = mask
        grouped = query.view(rows, kv_heads, heads // kv_heads, head_dim).transpose(0, 1)
        grouped = grouped.reshape(kv_heads * rows, -1, head_dim)
        # The softmax is in float32, whatever the cache holds.
        scores = torch.add(group.masks[window], torch.bmm(grouped, keys.transpose(1, 2)))
        weights = torch.softmax(scores, dim=-1).to(values.dtype)
        out = torch.bmm(weights, values).view(kv_heads, rows, -1, head_dim)
        return out.transpose(0, 1).reshape(rows, heads * head_dim)

    def _prefill(
        self,
        cache: KVCache,
        query: Tensor,
        key_value: Tensor,
        layer: int,
        window: int | None,
        plan: TorchPlan,
    ) -> Tensor:
        batch = plan.batch
        tokens, heads, head_dim = query.shape
        # [2, kv_heads, T, head_dim]
        passed = key_value.view(tokens, 2, -1, head_dim).permute(1, 2, 0, 3)
        out = torch.empty(tokens, heads, head_dim, dtype=query.dtype, device=query.device)
        for row, context in enumerate(batch.host_context_lens):
            start, end = batch.cu_seqlens_q[row], batch.cu_seqlens_q[row + 1]
            length = end - start
            if context == length:
                # Nothing came before: what this pass computed is all there is to see.
                keys, values = passed[:, :, start:end].unbind()
            else:
                width = -(-context // self.block_size)
                index = cache.block_index(batch.block_tables[row, :width])
                keys, values = (part[:, :context] for part in cache.gather(layer, index, 1))
            causal = context == length and (window is None or context <= window)
            mask = None
            if not causal and (mask := plan.prefill_masks.get((row, window))) is None:
                mask = _prefill_mask(length, context, window, query.device)
                plan.prefill_masks[row, window] = mask
            attended = F.scaled_dot_product_attention(
                query[start:end].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=mask,
                is_causal=causal,
                scale=1.0,
                enable_gqa=True,
            )
            out[start:end] = attended[0].transpose(0, 1)
        return out.view(tokens, heads * head_dim)


def group_by_length(context_lens: Sequence[int]) -> list[list[int]]:
    """Rows in groups whose longest is at most about twice the shortest, and whose padded blocks
    stay within MAX_GATHER_TOKENS; rows that are alike stay together and keep their order."""
    longest, shortest = max(context_lens), min(context_lens)
    if longest <= 2 * shortest + 64 and len(context_lens) * longest <= MAX_GATHER_TOKENS:
        return [list(range(len(context_lens)))]
    groups: list[list[int]] = []
    for row in sorted(range(len(context_lens)), key=context_lens.__getitem__):
        length = context_lens[row]
        if (
            not groups
            or length > 2 * context_lens[groups[-1][0]] + 64
            or (len(groups[-1]) + 1) * length > MAX_GATHER_TOKENS
        ):
            groups.append([])
        groups[-1].append(row)
    return groups


def _decode_mask(context_lens: Tensor, width: int, kv_heads: int, window: int | None) -> Tensor:
    """0 where a row sees, -inf where it does not: [kv_heads * rows, 1, width] float32."""
    positions = torch.arange(width, device=context_lens.device)
    hidden = positions >= context_lens[:, None]
    if window is not None:
        hidden |= positions < context_lens[:, None] - window
    mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
    return mask.repeat(kv_heads, 1)[:, None]


def _prefill_mask(length: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """True where the last `length` of `context` tokens see: [length, context]."""
    query = torch.arange(context - length, context, device=device)[:, None]
    seen = torch.arange(context, device=device)[None]
    mask = seen <= query
    if window is not None:
        mask &= seen > query - window
    return mask
