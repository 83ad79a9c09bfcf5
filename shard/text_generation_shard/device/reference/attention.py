"""The reference attention: plain torch on any device. The specification of the faster ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_shard.device.forward import Angles, AttentionPlan, CacheShape, ForwardBatch


class KVCache:
    """Owns one tensor [layers, 2, kv_heads, blocks, block_size, head_dim].

    Heads come before blocks, so that the gathered blocks of one head form a contiguous [context,
    head_dim] matrix, which a batched matrix product takes without another copy.
    """

    def __init__(
        self, shape: CacheShape, num_blocks: int, make_zeros: Callable[[int, int, int], Tensor]
    ) -> None:
        """`make_zeros(parts, blocks per part, bytes per block)` returns zeros in uint8."""
        self.shape = shape
        self.num_blocks = num_blocks
        self.nbytes = shape.block_bytes * num_blocks
        # Unwritten slots must be finite: see `store`.
        count = 2 * shape.num_layers * shape.num_kv_heads
        zeros = make_zeros(count, num_blocks, shape.block_bytes // count)
        data = zeros.view(shape.dtype).view(
            *(shape.num_layers, 2, shape.num_kv_heads),
            *(num_blocks, shape.block_size, shape.head_dim),
        )
        # Keys and values share indices, so that one operator stores or gathers both. Per layer [2 *
        # kv_heads * blocks * block_size, head_dim] …
        self._slots = [layer.view(-1, shape.head_dim) for layer in data]
        # … and the same memory as [2 * kv_heads * blocks, block_size * head_dim].
        self._blocks = [layer.view(-1, shape.block_size * shape.head_dim) for layer in data]
        self._heads = torch.arange(2 * shape.num_kv_heads, device=data.device)

    def slot_index(self, slots: Tensor) -> Tensor:
        """Indices of `slots` [T] in every head: [T * 2 * kv_heads]."""
        return (slots[:, None] + self._heads * (self.num_blocks * self.shape.block_size)).flatten()

    def block_index(self, blocks: Tensor) -> Tensor:
        """Indices of a flat block table [N] in every head: [2 * kv_heads * N]."""
        return (self._heads[:, None] * self.num_blocks + blocks).flatten()

    def store(self, layer: int, slot_index: Tensor, key_value: Tensor) -> None:
        """Write key_value [T, 2 * kv_heads, head_dim], keys first, at `slot_index`.

        Values that are not finite are written as 0: masked slots are multiplied by 0, and 0 × NaN
        would spread one request's overflow to every row whose padded block table contains the
        block.
        """
        finite = key_value.reshape(-1, self.shape.head_dim).nan_to_num(0.0, 0.0, 0.0)
        self._slots[layer].index_copy_(0, slot_index, finite)

    def gather(self, layer: int, block_index: Tensor, num_tables: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `num_tables` block tables of equal width.

        `block_index` is that of the flattened tables. Keys and values are [kv_heads * num_tables,
        width * block_size, head_dim] each.
        """
        gathered = self._blocks[layer].index_select(0, block_index)
        tables = self.shape.num_kv_heads * num_tables
        keys, values = gathered.view(2, tables, -1, self.shape.head_dim).unbind()
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


# Most cached tokens gathered at once, for keys and again for values.
MAX_GATHER_TOKENS = 1 << 17

# Rows with at most this number of tokens in a pass are computed in groups, longer rows one by one.
_MOST_GROUPED = 16
# Token counts that rows of a group are padded to.
_GROUP_LENGTHS = (1, 2, 4, 8, _MOST_GROUPED)


@dataclass(slots=True)
class RowGroup:
    """Rows of similar context with at most `length` tokens each, padded to that."""

    # [rows * length] indices of tokens of the pass; None: all tokens, in order.
    tokens: Tensor | None
    length: int
    # [rows, length] number of tokens that each token sees.
    seen: Tensor
    block_index: Tensor
    # By window size; shared by all layers.
    masks: dict[int | None, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class TorchPlan:
    """Cache indices for one pass."""

    batch: ForwardBatch
    rotation: TorchRotation
    slot_index: Tensor
    groups: list[RowGroup]
    # Rows that are computed one by one.
    long_rows: list[int]
    # Masks of continued prompts by (row, window).
    prefill_masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)


class TorchAttention:
    """Few tokens: two batched matrix products over (KV head × row). Many: one SDPA call per row."""

    name = "torch"
    block_size = 16
    is_deterministic = False
    heaviest_keys: int | None = None

    def __init__(self, scale: float, make_zeros: Callable[[int, int, int], Tensor]) -> None:
        """Queries are multiplied by `scale`. `make_zeros`: see KVCache."""
        self._scale, self._make_zeros = scale, make_zeros
        self._cache: KVCache | None = None

    def workspace_bytes(self, shape: CacheShape) -> int:
        """See Attention."""
        return 2 * MAX_GATHER_TOKENS * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize

    def allocate(self, shape: CacheShape, num_blocks: int) -> int:
        """See Attention."""
        self._cache = None
        self._cache = KVCache(shape, num_blocks, self._make_zeros)
        return self._cache.nbytes

    def plan(self, batch: ForwardBatch, angles: Angles) -> TorchPlan:
        """See Attention."""
        assert self._cache is not None, "allocate comes before plan"
        slot_index = self._cache.slot_index(batch.slots)
        by_length: dict[int, list[int]] = {}
        long_rows: list[int] = []
        if batch.is_decode:
            by_length[1] = list(range(len(batch.host_context_lens)))
        else:
            for row, (start, end) in enumerate(pairwise(batch.cu_seqlens_q)):
                if end - start > _MOST_GROUPED:
                    long_rows.append(row)
                else:
                    length = next(item for item in _GROUP_LENGTHS if item >= end - start)
                    by_length.setdefault(length, []).append(row)
        groups = [
            group
            for length, rows in by_length.items()
            for group in self._groups(self._cache, batch, rows, length)
        ]
        rotation = TorchRotation(angles, self._cache.shape.dtype)
        return TorchPlan(batch, rotation, slot_index, groups, long_rows)

    def _groups(
        self, cache: KVCache, batch: ForwardBatch, rows: list[int], length: int
    ) -> list[RowGroup]:
        """Rows are padded only to the longest row of their group, so that one long row does not
        make all short ones expensive."""
        groups = []
        contexts = [batch.host_context_lens[row] for row in rows]
        steps = torch.arange(length)
        for places in group_by_length(contexts, length):
            members = [rows[place] for place in places]
            width = -(-max(contexts[place] for place in places) // self.block_size)
            if length == 1 and len(members) == len(batch.host_context_lens):
                tables, tokens, seen = batch.block_tables, None, batch.context_lens[:, None]
            else:
                device = batch.block_tables.device
                tables = batch.block_tables[torch.tensor(members, device=device)]
                offsets = torch.tensor(batch.cu_seqlens_q)
                starts, ends = offsets[members][:, None], offsets[1:][members][:, None]
                # Padding repeats the row's last token.
                index = torch.minimum(starts + steps, ends - 1)
                context_lens = torch.tensor(batch.host_context_lens)[members][:, None]
                seen = (context_lens - (ends - 1 - index)).to(device)
                tokens = index.flatten().to(device)
            blocks = cache.block_index(tables[:, :width].flatten())
            groups.append(RowGroup(tokens, length, seen, blocks))
        return groups

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
        self._cache.store(layer, plan.slot_index, key_value)
        if len(plan.groups) == 1 and plan.groups[0].tokens is None:
            return self._grouped(self._cache, query, layer, window, plan.groups[0])
        out = torch.empty_like(query).flatten(1)
        for group in plan.groups:
            assert group.tokens is not None, "only a single group holds all tokens in order"
            # Padding repeats a token, and so writes the same values again.
            out[group.tokens] = self._grouped(
                self._cache, query[group.tokens], layer, window, group
            )
        for row in plan.long_rows:
            self._prefill_row(self._cache, query, key_value, layer, window, plan, row, out)
        return out

    def _grouped(
        self, cache: KVCache, query: Tensor, layer: int, window: int | None, group: RowGroup
    ) -> Tensor:
        """query [rows * length, heads, head_dim] → [rows * length, heads * head_dim]."""
        tokens, heads, head_dim = query.shape
        length, kv_heads = group.length, cache.shape.num_kv_heads
        rows = tokens // length
        # keys, values: [kv_heads * rows, context, head_dim], context padded to the longest row.
        keys, values = cache.gather(layer, group.block_index, rows)
        if window not in group.masks:
            group.masks[window] = _group_mask(group.seen, keys.shape[1], kv_heads, window)
        # The tokens of a row and the query heads that share a KV head form one matrix: each block
        # is read once for all of them.
        grouped = query.view(rows, length, kv_heads, -1, head_dim).permute(2, 0, 1, 3, 4)
        products = torch.bmm(grouped.reshape(kv_heads * rows, -1, head_dim), keys.transpose(1, 2))
        # The softmax is computed in float32 for every cache dtype.
        scores = torch.add(
            group.masks[window], products.view(kv_heads * rows, length, -1, keys.shape[1])
        )
        weights = torch.softmax(scores, dim=-1).to(values.dtype)
        out = torch.bmm(weights.view(kv_heads * rows, -1, keys.shape[1]), values)
        out = out.view(kv_heads, rows, length, -1, head_dim).permute(1, 2, 0, 3, 4)
        return out.reshape(tokens, heads * head_dim)

    def _prefill_row(
        self,
        cache: KVCache,
        query: Tensor,
        key_value: Tensor,
        layer: int,
        window: int | None,
        plan: TorchPlan,
        row: int,
        out: Tensor,
    ) -> None:
        """Attention of the tokens of one row; `out` is [T, heads * head_dim]."""
        batch = plan.batch
        start, end = batch.cu_seqlens_q[row], batch.cu_seqlens_q[row + 1]
        context, length = batch.host_context_lens[row], end - start
        if context == length:
            # The whole context is in this pass: the cache is not read.
            passed = key_value[start:end].view(length, 2, -1, query.shape[2])
            keys, values = passed.permute(1, 2, 0, 3).unbind()
        else:
            width = -(-context // self.block_size)
            index = cache.block_index(batch.block_tables[row, :width])
            keys, values = (part[:, :context] for part in cache.gather(layer, index, 1))
        causal = context == length and (window is None or context <= window)
        mask = None
        if not causal and (mask := plan.prefill_masks.get((row, window))) is None:
            mask = _prefill_mask(length, context, window, query)
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
        out[start:end] = attended[0].transpose(0, 1).flatten(1)


def group_by_length(context_lens: Sequence[int], length: int = 1) -> list[list[int]]:
    """Group rows so that the longest context of a group is at most about twice the shortest, and
    the padded tokens of a group are at most MAX_GATHER_TOKENS / `length`. If one group suffices, it
    keeps the order of the rows."""
    most = MAX_GATHER_TOKENS // length
    longest, shortest = max(context_lens), min(context_lens)
    if longest <= 2 * shortest + 64 and len(context_lens) * longest <= most:
        return [list(range(len(context_lens)))]
    groups: list[list[int]] = []
    for row in sorted(range(len(context_lens)), key=context_lens.__getitem__):
        context = context_lens[row]
        if (
            not groups
            or context > 2 * context_lens[groups[-1][0]] + 64
            or (len(groups[-1]) + 1) * context > most
        ):
            groups.append([])
        groups[-1].append(row)
    return groups


def _group_mask(seen: Tensor, width: int, kv_heads: int, window: int | None) -> Tensor:
    """0 where a token is seen, else -inf: [kv_heads * rows, length, 1, width] float32."""
    positions = torch.arange(width, device=seen.device)
    hidden = positions >= seen[..., None]
    if window is not None:
        hidden |= positions < seen[..., None] - window
    mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
    return mask.repeat(kv_heads, 1, 1)[:, :, None]


def _prefill_mask(length: int, context: int, window: int | None, query: Tensor) -> Tensor:
    """The mask of the last `length` of `context` tokens: 0 where a token is seen, else -inf;
    [length, context] in the dtype of the queries, because SDPA converts a bool mask in every
    layer."""
    last = torch.arange(context - length, context, device=query.device)[:, None]
    seen = torch.arange(context, device=query.device)[None]
    hidden = seen > last
    if window is not None:
        hidden |= seen <= last - window
    return query.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
