"""Attention over the paged cache by our own Triton kernels."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from text_generation_shard.device.base import Angles, AttentionPlan, CacheShape, ForwardBatch
from text_generation_shard.device.cuda.kernels import decode, launch, pointwise, prefill, tiles

# Of all rows of one launch: bounds the memory of what is merged behind it.
_MOST_SPLITS = 1 << 14


class HeadShape(NamedTuple):
    """What the heads of a model have alike."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Scores are multiplied by it, and then limited: cap * tanh(score / cap); 0: they are not.
    scale: float
    soft_cap: float = 0.0


class TritonPlan(NamedTuple):
    """What is the same in all layers of a pass."""

    slots: Tensor
    angles: Angles
    # [R, width], [R + 1] and [R], int32.
    tables: Tensor
    starts: Tensor | None
    lens: Tensor
    # The longest part of a row and the longest context.
    longest: int
    longest_context: int


class TritonAttention:
    """Owns the cache. A pass of one token a row is computed in splits of fixed size, which are
    merged in order; any other in tiles of each row's queries."""

    name = "triton"
    block_size = 16
    # A token that is computed anew with others is not decoded, but taken with them: other sums.
    is_deterministic = False

    def __init__(
        self,
        shape: HeadShape,
        device: torch.device,
        capability: int,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """capability: see `tiles`. slopes [num_heads] float32: what each token further back is
        worth less (ALiBi); sinks [num_heads] float32: a score beside those of the tokens."""
        self._shape, self._device = shape, device
        self._slopes, self._sinks = slopes, sinks
        self._decode = tiles.decode_tile(capability, shape.head_dim)
        self._prefill = tiles.prefill_tile(capability, shape.head_dim)
        self._dim_pad = max(16, triton.next_power_of_2(shape.head_dim))
        # What both kernels of attention are compiled for.
        self._constants = {
            "SCALE": shape.scale,
            "SOFT_CAP": shape.soft_cap,
            "NUM_HEADS": shape.num_heads,
            "NUM_KV_HEADS": shape.num_kv_heads,
            "HEAD_DIM": shape.head_dim,
            "DIM_PAD": self._dim_pad,
            "BLOCK": self.block_size,
        }
        self.cache: Tensor | None = None
        """[layers, 2, slots, kv_heads, head_dim]."""

    def workspace_bytes(self, shape: CacheShape) -> int:
        """See Attention: the splits of a decode."""
        return _MOST_SPLITS * self._shape.num_heads * (self._shape.head_dim + 1) * 4

    def allocate(self, shape: CacheShape, num_blocks: int) -> int:
        """See Attention."""
        self.cache = None
        sizes = shape.num_layers, 2, num_blocks * shape.block_size
        heads = shape.num_kv_heads, shape.head_dim
        self.cache = torch.zeros(*sizes, *heads, dtype=shape.dtype, device=self._device)
        return self.cache.nbytes

    def plan(self, batch: ForwardBatch, angles: Angles) -> TritonPlan:
        """See Attention."""
        starts, longest = None, 1
        if not batch.is_decode:
            offsets = torch.tensor(batch.cu_seqlens_q, dtype=torch.int32)
            longest = int(offsets.diff().max())
            starts = offsets.to(self._device, non_blocking=True)
        return TritonPlan(
            batch.slots,
            angles,
            batch.block_tables.int().contiguous(),
            starts,
            batch.context_lens.int(),
            longest,
            max(batch.host_context_lens),
        )

    def forward(
        self, heads: Tensor, layer: int, window: int | None, is_rotated: bool, plan: AttentionPlan
    ) -> Tensor:
        """See Attention."""
        assert self.cache is not None and isinstance(plan, TritonPlan)
        keys, values = self.cache[layer]
        self.store(heads, keys, values, is_rotated, plan)
        out = heads.new_empty(len(heads), self._shape.num_heads * self._shape.head_dim)
        if plan.starts is None:
            self._attend_split(heads, keys, values, window or 0, plan, out)
            return out
        tile = self._prefill
        launch(
            prefill.attend_prompts,
            (-(-plan.longest // tile.queries), self._shape.num_heads, len(plan.lens)),
            *(heads, keys, values, plan.tables, plan.starts, plan.lens),
            *(self._slopes, self._sinks, out, plan.tables.shape[1]),
            WINDOW=window or 0,
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
        """Rotate queries in place, and put keys and values [slots, kv_heads, head_dim] where the
        plan says."""
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

    def _attend_split(
        self,
        heads: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int,
        plan: TritonPlan,
        out: Tensor,
    ) -> None:
        own, tile = self._shape, self._decode
        splits = -(-plan.longest_context // tile.split)
        at_once = max(1, _MOST_SPLITS // splits)
        for first in range(0, len(heads), at_once):
            some = slice(first, first + at_once)
            lens, tables, rows = plan.lens[some], plan.tables[some], len(heads[some])
            sums = heads.new_empty(rows, splits, own.num_heads, dtype=torch.float32)
            parts = sums.new_empty(*sums.shape, own.head_dim)
            launch(
                decode.attend_split,
                (rows, own.num_kv_heads, splits),
                *(heads[some], keys, values, tables, lens, self._slopes, parts, sums),
                tables.shape[1],
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
                (rows, own.num_heads),
                *(parts, sums, lens, self._sinks, out[some], splits),
                NUM_HEADS=own.num_heads,
                HEAD_DIM=own.head_dim,
                DIM_PAD=self._dim_pad,
                SPLIT=tile.split,
                num_warps=1,
            )
