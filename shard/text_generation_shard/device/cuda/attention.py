"""Attention over the paged cache by our Triton kernels; prompts optionally by torch's
FlashAttention."""

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from text_generation_shard.arrays import Upload, plain_upload
from text_generation_shard.device.cuda import flash
from text_generation_shard.device.cuda.kernels import decode, launch, pointwise, prefill, tiles
from text_generation_shard.device.cuda.rows import HeadShape, Prompts, Rows
from text_generation_shard.device.forward import Angles, AttentionPlan, CacheShape, ForwardBatch

# Most splits in one launch over all rows; bounds the memory of the partial results.
_MOST_SPLITS = 1 << 14


class TritonPlan(NamedTuple):
    """What all layers of a pass share. The leading rows of one token each are decoded; the rows
    after them are prompts."""

    slots: Tensor
    angles: Angles
    decoded: Rows
    prompts: Prompts | None


class TritonAttention:
    """Owns the cache. Decoded rows are computed in splits of fixed size, which are merged in order;
    prompts in tiles of queries, which add in another order. If `is_deterministic`, prompt tokens
    are decoded too, so that a token's sums are always added in the same order."""

    block_size = 16

    def __init__(
        self,
        shape: HeadShape,
        device: torch.device,
        capability: int,
        takes_flash: bool = False,
        upload: Upload | None = None,
        is_deterministic: bool = False,
    ) -> None:
        """capability: see `tiles`. takes_flash: compute prompts by `flash`, unless
        `is_deterministic` (see Attention)."""
        self._shape, self._device, self._capability = shape, device, capability
        self._upload = upload or plain_upload(device)
        self._takes_flash = takes_flash and not is_deterministic
        self.is_deterministic = is_deterministic
        self.name = "triton+varlen_attn" if self._takes_flash else "triton"
        self.heaviest_keys = flash.MOST_TOKENS if self._takes_flash else None
        self._decode_tile = tiles.decode_tile(capability, shape.head_dim)
        self._dim_pad = max(16, triton.next_power_of_2(shape.head_dim))
        # Compile-time constants of both attention kernels.
        self._constants = {
            "SCALE": shape.scale,
            "NUM_HEADS": shape.num_heads,
            "NUM_KV_HEADS": shape.num_kv_heads,
            "HEAD_DIM": shape.head_dim,
            "DIM_PAD": self._dim_pad,
            "BLOCK": self.block_size,
        }
        self.cache: Tensor | None = None
        """[layers, 2, slots, kv_heads, head_dim]."""

    def workspace_bytes(self, shape: CacheShape) -> int:
        """See Attention: 0, because the memory profile measures it."""
        return 0

    def allocate(self, shape: CacheShape, num_blocks: int) -> int:
        """See Attention."""
        self.cache = None
        self._prefill_tile = tiles.prefill_tile(self._capability, shape.head_dim, shape.dtype)
        sizes = shape.num_layers, 2, num_blocks * shape.block_size
        heads = shape.num_kv_heads, shape.head_dim
        self.cache = torch.zeros(*sizes, *heads, dtype=shape.dtype, device=self._device)
        return self.cache.nbytes

    def plan(self, batch: ForwardBatch, angles: Angles) -> TritonPlan:
        """See Attention."""
        tables, lens = batch.block_tables.int().contiguous(), batch.context_lens.int()
        if self.is_deterministic:
            decoded = Rows.of_tokens(self._upload, batch, tables)
            return TritonPlan(batch.slots, angles, decoded, None)
        counts = [end - start for start, end in pairwise(batch.cu_seqlens_q)]
        num_decoded = next((row for row, count in enumerate(counts) if count > 1), len(counts))
        contexts, prompts = batch.host_context_lens, None
        if num_decoded < len(counts):
            own = slice(num_decoded, None)
            prompts = Prompts.of(self._upload, tables[own], lens[own], contexts[own], counts[own])
        decoded = Rows(
            tables[:num_decoded], lens[:num_decoded], max(contexts[:num_decoded], default=0)
        )
        return TritonPlan(batch.slots, angles, decoded, prompts)

    def forward(
        self, heads: Tensor, layer: int, window: int | None, is_rotated: bool, plan: AttentionPlan
    ) -> Tensor:
        """See Attention."""
        assert self.cache is not None and isinstance(plan, TritonPlan)
        keys, values = self.cache[layer]
        self.store(heads, keys, values, is_rotated, plan)
        count, found = len(plan.decoded.lens), []
        if count:
            found.append(self._decode(heads[:count], keys, values, window or 0, plan.decoded))
        if plan.prompts is not None:
            found.append(self._attend(heads[count:], keys, values, window or 0, plan.prompts))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _attend(
        self, heads: Tensor, keys: Tensor, values: Tensor, window: int, rows: Prompts
    ) -> Tensor:
        """Prompt tokens [T, …] → [T, num_heads * head_dim]."""
        if self._takes_flash and rows.num_keys <= flash.MOST_TOKENS:
            return flash.attend(self._shape, heads, keys, values, window, rows)
        out = heads.new_empty(len(heads), self._shape.num_heads * self._shape.head_dim)
        tile = self._prefill_tile
        launch(
            prefill.attend_prompts,
            (-(-rows.longest // tile.queries), self._shape.num_heads, len(rows.lens)),
            *(heads, keys, values, rows.tables, rows.starts, rows.lens),
            *(out, rows.tables.shape[1]),
            WINDOW=window,
            QUERIES=tile.queries,
            KEYS=tile.keys,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **self._constants,
        )
        return out

    def store(
        self, heads: Tensor, keys: Tensor, values: Tensor, is_rotated: bool, plan: TritonPlan
    ) -> None:
        """Rotate queries in place; rotate keys, and store keys and values [slots, kv_heads,
        head_dim] in the plan's slots."""
        own, half = self._shape, plan.angles.table.shape[2] if is_rotated else 0
        launch(
            pointwise.rotate_and_store,
            (len(heads),),
            *(heads, plan.angles.table, plan.angles.rows, plan.slots, keys, values),
            NUM_HEADS=own.num_heads,
            NUM_KV_HEADS=own.num_kv_heads,
            HEADS_PAD=triton.next_power_of_2(own.num_heads + own.num_kv_heads),
            KV_PAD=triton.next_power_of_2(own.num_kv_heads),
            HEAD_DIM=own.head_dim,
            DIM_PAD=self._dim_pad,
            HALF=half,
            HALF_PAD=triton.next_power_of_2(max(half, 1)),
        )

    def _decode(
        self, heads: Tensor, keys: Tensor, values: Tensor, window: int, rows: Rows
    ) -> Tensor:
        """One token of each row [R, …] → [R, num_heads * head_dim]."""
        own, tile = self._shape, self._decode_tile
        out = heads.new_empty(len(heads), own.num_heads * own.head_dim)
        splits = -(-rows.longest_context // tile.split)
        at_once = max(1, _MOST_SPLITS // splits)
        for first in range(0, len(heads), at_once):
            some = slice(first, first + at_once)
            part, count = rows.part(some), len(heads[some])
            sums = heads.new_empty(count, splits, own.num_heads, dtype=torch.float32)
            parts = sums.new_empty(*sums.shape, own.head_dim)
            launch(
                decode.attend_split,
                (count, own.num_kv_heads, splits),
                *(heads[some], keys, values, part.tables, part.lens, part.owners),
                *(parts, sums, part.tables.shape[1]),
                WINDOW=window,
                GROUP_PAD=max(16, triton.next_power_of_2(own.num_heads // own.num_kv_heads)),
                TILE=tile.tile,
                SPLIT=tile.split,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                **self._constants,
            )
            launch(
                decode.merge_splits,
                (count, own.num_heads),
                *(parts, sums, part.lens, out[some], splits),
                NUM_HEADS=own.num_heads,
                HEAD_DIM=own.head_dim,
                DIM_PAD=self._dim_pad,
                SPLIT=tile.split,
                num_warps=1,
            )
        return out
