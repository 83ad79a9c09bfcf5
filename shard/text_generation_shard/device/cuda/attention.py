"""Attention over the paged cache by our Triton kernels; prompts optionally by torch's
FlashAttention-2 (`varlen_attn`). That does not read block tables, so keys and values are gathered
first."""

import inspect
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import triton
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from text_generation_shard.arrays import Upload, plain_upload
from text_generation_shard.device.base import Angles, AttentionPlan, CacheShape, ForwardBatch
from text_generation_shard.device.cuda.kernels import attention as kernels
from text_generation_shard.device.cuda.kernels import launch

# Most splits in one launch over all rows; bounds the memory of the partial results.
_MOST_SPLITS = 1 << 14
MOST_TOKENS = 1 << 16
"""Most tokens whose keys and values are gathered in a pass; bounds the memory."""

# Least compute capability for FlashAttention.
_CAPABILITY = 80
# Tile of one program of `gather`: tokens (one block) and features.
_TILE, _PART = 16, 1024
# torch 2.11 has grouped KV heads without this argument.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


class DecodeTile(NamedTuple):
    """How `attend_split` splits the context of a row."""

    # Tokens per program, independent of the batch; tokens per product.
    split: int
    tile: int
    num_warps: int
    num_stages: int


class PrefillTile(NamedTuple):
    """How `attend_prompts` tiles queries and keys."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# Tiles by compute capability: the largest key not above the device's applies; 0 is for the
# interpreter. Chosen so that kernels compile without spills and within the shared memory of a block
# (99 KiB on 8.9), not by measurement.
_DECODE = {0: DecodeTile(64, 64, 4, 2), 80: DecodeTile(512, 64, 4, 2)}
_PREFILL = {
    0: PrefillTile(32, 64, 4, 2),
    80: PrefillTile(128, 32, 8, 3),
    89: PrefillTile(128, 64, 8, 2),
}
# For a float8 cache: the converted tile takes additional registers.
_PREFILL_FLOAT8 = {**_PREFILL, 89: _PREFILL[80], 90: _PREFILL[89]}
# Heads with more features than this get half the tile.
_WIDE_HEAD = 128


def decode_tile(capability: int, head_dim: int) -> DecodeTile:
    """capability: 90 for 9.0."""
    own = _DECODE[max(least for least in _DECODE if least <= capability)]
    return own._replace(tile=own.tile // 2) if head_dim > _WIDE_HEAD else own


def prefill_tile(capability: int, head_dim: int, cache_dtype: torch.dtype) -> PrefillTile:
    """capability: see `decode_tile`."""
    table = _PREFILL_FLOAT8 if cache_dtype.itemsize == 1 else _PREFILL
    own = table[max(least for least in table if least <= capability)]
    if head_dim > _WIDE_HEAD:
        return own._replace(queries=own.queries // 2, keys=own.keys // 2)
    return own


class HeadShape(NamedTuple):
    """Shape and scale of a model's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Scores are multiplied by `scale`.
    scale: float


class Rows(NamedTuple):
    """Rows with one token each."""

    # [R, width] and [R], int32; lens: tokens that each row sees, including its own.
    tables: Tensor
    lens: Tensor
    longest_context: int
    # [R] int32: index of each row's block table; None: its own.
    owners: Tensor | None = None

    @classmethod
    def of_tokens(cls, upload: Upload, batch: ForwardBatch, tables: Tensor) -> Self:
        """Each token of a pass as a row of its own, with the block table of the token's row."""
        if batch.is_decode:
            owners = torch.arange(len(tables), dtype=torch.int32, device=tables.device)
        else:
            counts = np.diff(batch.cu_seqlens_q)
            (owners,) = upload([np.repeat(np.arange(len(counts), dtype=np.int32), counts)])
        lens = (batch.positions + 1).int()
        return cls(tables, lens, max(batch.host_context_lens), owners)

    def part(self, some: slice) -> Self:
        """A slice of the rows."""
        lens = self.lens[some]
        if self.owners is None:
            return self._replace(tables=self.tables[some], lens=lens)
        return self._replace(lens=lens, owners=self.owners[some])


class Prompts(NamedTuple):
    """Rows with several tokens, one row after another."""

    # See Rows.
    tables: Tensor
    lens: Tensor
    # [R + 1] int32: offsets of each row's tokens, and of its keys if gathered.
    starts: Tensor
    key_starts: Tensor
    # Number of all keys; most tokens and most keys of a row.
    num_keys: int
    longest: int
    longest_context: int

    @classmethod
    def of(
        cls,
        upload: Upload,
        tables: Tensor,
        lens: Tensor,
        contexts: Sequence[int],
        counts: Sequence[int],
    ) -> Self:
        """From block tables and lens on the device, and lens (`contexts`) and token counts on the
        host."""
        both = [accumulate(values, initial=0) for values in (counts, contexts)]
        own, keys = upload([np.fromiter(values, np.int32) for values in both])
        return cls(tables, lens, own, keys, sum(contexts), max(counts), max(contexts))


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
        """capability: see `decode_tile`. takes_flash: compute prompts by `_attend_gathered`, unless
        `is_deterministic` (see Attention)."""
        self._shape, self._device, self._capability = shape, device, capability
        self._upload = upload or plain_upload(device)
        self._takes_flash = takes_flash and not is_deterministic
        self.is_deterministic = is_deterministic
        self.name = "triton+varlen_attn" if self._takes_flash else "triton"
        self.heaviest_keys = MOST_TOKENS if self._takes_flash else None
        self._decode_tile = decode_tile(capability, shape.head_dim)
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
        self._prefill_tile = prefill_tile(self._capability, shape.head_dim, shape.dtype)
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
        if self._takes_flash and rows.num_keys <= MOST_TOKENS:
            return self._attend_gathered(heads, keys, values, window, rows)
        out = heads.new_empty(len(heads), self._shape.num_heads * self._shape.head_dim)
        tile, width = self._prefill_tile, rows.tables.shape[1]
        given = heads, keys, values, rows.tables, rows.starts, rows.lens, out, width
        launch(
            kernels.attend_prompts,
            (-(-rows.longest // tile.queries), self._shape.num_heads, len(rows.lens)),
            given,
            WINDOW=window,
            QUERIES=tile.queries,
            KEYS=tile.keys,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **self._constants,
        )
        return out

    def _attend_gathered(
        self, heads: Tensor, keys: Tensor, values: Tensor, window: int, rows: Prompts
    ) -> Tensor:
        """`_attend` by torch's FlashAttention."""
        shape = self._shape
        gathered = heads.new_empty(2, rows.num_keys, shape.num_kv_heads, shape.head_dim)
        width = shape.num_kv_heads * shape.head_dim
        part = min(_PART, triton.next_power_of_2(width))
        launch(
            kernels.gather,
            (len(rows.lens), -(-rows.longest_context // _TILE), -(-width // part)),
            (
                keys,
                values,
                rows.tables,
                rows.lens,
                rows.key_starts,
                *gathered,
                rows.tables.shape[1],
            ),
            WIDTH=width,
            PART=part,
            TILE=_TILE,
        )
        found = varlen_attn(
            heads[:, : shape.num_heads],
            gathered[0],
            gathered[1],
            rows.starts,
            rows.key_starts,
            rows.longest,
            rows.longest_context,
            scale=shape.scale,
            # Visible tokens before the token itself; -1: all.
            window_size=(window - 1, 0),
            **_GROUPED,
        )
        assert isinstance(found, Tensor)
        return found.flatten(1)

    def store(
        self, heads: Tensor, keys: Tensor, values: Tensor, is_rotated: bool, plan: TritonPlan
    ) -> None:
        """Rotate queries in place; rotate keys, and store keys and values [slots, kv_heads,
        head_dim] in the plan's slots."""
        own, half = self._shape, plan.angles.table.shape[2] if is_rotated else 0
        launch(
            kernels.rotate_and_store,
            (len(heads),),
            (heads, plan.angles.table, plan.angles.rows, plan.slots, keys, values),
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
            given = heads[some], keys, values, part.tables, part.lens, part.owners, parts, sums
            launch(
                kernels.attend_split,
                (count, own.num_kv_heads, splits),
                (*given, part.tables.shape[1]),
                WINDOW=window,
                GROUP_PAD=max(16, triton.next_power_of_2(own.num_heads // own.num_kv_heads)),
                TILE=tile.tile,
                SPLIT=tile.split,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                **self._constants,
            )
            launch(
                kernels.merge_splits,
                (count, own.num_heads),
                (parts, sums, part.lens, out[some], splits),
                NUM_HEADS=own.num_heads,
                HEAD_DIM=own.head_dim,
                DIM_PAD=self._dim_pad,
                SPLIT=tile.split,
                num_warps=1,
            )
        return out


def suits_flash(shape: HeadShape, dtype: torch.dtype, capability: int) -> bool:
    """Whether it supports heads of this shape."""
    return (
        dtype in (torch.float16, torch.bfloat16)
        and capability >= _CAPABILITY
        and shape.head_dim <= 256
        and shape.head_dim % 8 == 0
    )
