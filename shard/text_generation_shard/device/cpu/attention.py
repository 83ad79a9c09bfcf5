"""Attention on the CPU, over a paged cache in the layout of `kernels.attention`."""

import mmap
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Ints
from text_generation_shard.device import base
from text_generation_shard.device.base import Angles, AttentionPlan, CacheShape, ForwardBatch
from text_generation_shard.device.cpu.kernels import attention
from text_generation_shard.device.cpu.kernels.layers import plan_rows
from text_generation_shard.device.cpu.kernels.pointwise import rotate_
from text_generation_shard.device.cpu.kernels.thread_pool import compute
from text_generation_shard.device.cpu.kernels.vector import marker, tensor_address

# Tokens whose pages are written when the cache is allocated, for the timed warm-up passes: reads of
# unwritten pages would hit the shared zero page, and be too fast.
_WARM_TOKENS = 2112


def unwritten_zeros(count: int, num_blocks: int, block_bytes: int) -> Tensor:
    """Zeros in uint8 for `count` parts of `num_blocks` blocks, which take no memory until they are
    written."""
    # Private, because shared pages are allocated more slowly.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, count * num_blocks * block_bytes, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8)


class PackedCache:
    """Owns the blocks [layers, kv_heads, num_blocks, keys and values]; see `kernels.attention`."""

    def __init__(self, shape: CacheShape, num_blocks: int) -> None:
        count = shape.num_layers * shape.num_kv_heads
        self._memory = unwritten_zeros(count, num_blocks, shape.block_bytes // count)
        first = -(-_WARM_TOKENS // shape.block_size)
        self._memory.view(count, num_blocks, -1)[:, :first].zero_()
        self.num_blocks = num_blocks
        self.layer_bytes = shape.block_bytes * num_blocks // shape.num_layers
        self.address = tensor_address(self._memory)


class PackedPlan(NamedTuple):
    """What all layers of a pass share, in the form of the kernels."""

    # [T], [*, width] and [N, 6].
    slots: Any
    block_tables: Any
    tasks: Any
    # [S] and [M, 6], see `kernels.layers.Given`; M is 0 if all tokens are wanted.
    wanted: Any
    last_tasks: Any
    # Threads that the tasks are distributed to.
    num_threads: int
    angles: Angles


class PackedAttention:
    """One kernel computes all queries of a pass; a query's result depends only on its own row."""

    name = "packed"
    block_size = attention.BLOCK_SIZE
    is_deterministic = True
    heaviest_keys: int | None = None

    def __init__(self, num_heads: int, num_kv_heads: int, scale: float) -> None:
        self._num_heads, self._num_kv_heads, self._scale = num_heads, num_kv_heads, scale
        self.cache: PackedCache | None = None

    def workspace_bytes(self, shape: CacheShape) -> int:
        """See Attention; nothing is copied."""
        return 0

    def allocate(self, shape: CacheShape, num_blocks: int) -> int:
        """See Attention."""
        self.cache = None
        self.cache = PackedCache(shape, num_blocks)
        return shape.block_bytes * num_blocks

    def plan(self, batch: ForwardBatch, angles: Angles) -> PackedPlan:
        """See Attention."""
        offsets, contexts = np.array(batch.cu_seqlens_q), np.array(batch.host_context_lens)
        group = self._num_heads // self._num_kv_heads
        num_threads = numba.get_num_threads()
        slots, tables = batch.slots.numpy(), batch.block_tables.contiguous().numpy()
        tasks = _tasks(offsets, contexts, group, num_threads)
        wanted = batch.logits_indices
        if wanted is None or len(wanted) == len(slots):
            own = np.arange(len(slots)), _NO_TASKS
        else:
            last_tasks = _tasks(offsets, contexts, group, num_threads, wanted.numpy())
            own = wanted.numpy(), last_tasks
        return PackedPlan(slots, tables, tasks, *own, num_threads, angles)

    def plan_rows(
        self, rows: base.Rows, scheduled: base.ScheduledTokens, angles: Angles
    ) -> tuple[Ints, PackedPlan]:
        """Token ids [R] and plan of a decode pass."""
        group, num_threads = self._num_heads // self._num_kv_heads, numba.get_num_threads()
        which, tables = (scheduled.rows, scheduled.starts), rows.block_tables
        input_ids, slots, tasks = plan_rows(*which, rows.token_ids, tables, group, num_threads)
        plan = slots, tables, tasks, np.arange(len(slots)), _NO_TASKS
        return input_ids, PackedPlan(*plan, num_threads, angles)

    def forward(
        self,
        heads: Tensor,
        layer: int,
        window: int | None,
        is_rotated: bool,
        plan: AttentionPlan,
    ) -> Tensor:
        """See Attention."""
        assert self.cache is not None and isinstance(plan, PackedPlan)
        num_queries, head_dim = self._num_heads, heads.shape[2]
        if is_rotated:
            num_rotated = num_queries + self._num_kv_heads
            rotate_(heads, num_rotated, num_queries, self._scale, *plan.angles)
        else:
            heads[:, :num_queries].mul_(self._scale)
        out = torch.empty(len(heads), num_queries * head_dim, dtype=heads.dtype)
        given = attention.Attention(
            kind=marker(heads.dtype),
            heads=tensor_address(heads),
            out=tensor_address(out),
            blocks=self.cache.address + layer * self.cache.layer_bytes,
            num_blocks=self.cache.num_blocks,
            num_heads=num_queries,
            num_kv_heads=self._num_kv_heads,
            head_dim=head_dim,
            window=window or 0,
            slots=plan.slots.ctypes.data,
            tables=plan.block_tables.ctypes.data,
            width=plan.block_tables.shape[1],
            tasks=plan.tasks.ctypes.data,
        )
        is_shared = len(heads) > attention.FEW_TOKENS
        compute(attention.store_token, given, len(heads), is_shared)
        compute(attention.attend_task, given, len(plan.tasks) * self._num_kv_heads, is_shared=True)
        return out


def _tasks(
    offsets: Any, contexts: Any, group: int, num_threads: int, wanted: Any | None = None
) -> Any:
    """Split the queries of R rows into tasks, see `kernels.Attention`, in an order that gives each
    thread long and short ones. offsets [R + 1] and contexts [R] of the rows. wanted [S]: only the
    queries of these tokens; their results move together."""
    lengths = np.diff(offsets)
    rows = np.arange(len(lengths))
    begins, ends, moves = 0 * lengths, lengths * group, 0 * lengths
    if wanted is not None:
        rows = np.searchsorted(offsets, wanted, side="right") - 1
        begins = (wanted - offsets[rows]) * group
        ends, moves = begins + group, wanted - np.arange(len(wanted))
    counts = -(-(ends - begins) // attention.TASK_ROWS)
    parts = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(parts)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows, first = rows[parts], begins[parts] + within * attention.TASK_ROWS
    starts = (contexts - lengths)[rows]
    tasks = np.stack((rows, offsets[rows], starts, first, ends[parts], moves[parts]), axis=1)
    order = np.argsort(-(starts + first // group), kind="stable")
    dealt = np.concatenate([order[thread::num_threads] for thread in range(num_threads)])
    return np.ascontiguousarray(tasks[dealt], dtype=np.int64)


_NO_TASKS = np.empty((0, attention.TASK_FIELDS), dtype=np.int64)
