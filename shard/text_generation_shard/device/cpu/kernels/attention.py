"""Paged attention, for all queries of a pass.

The layout makes both products those of `tile`. A block holds 16 tokens. The lanes of a vector of
keys are the 16 tokens, so that scores need no sum across a vector; those of values are 16 features.
Blocks are read in place, without gathering.

The softmax is computed online (Milakov & Gimelshein 2018), in chunks of 64 tokens that begin at
multiples of 64 of the sequence. So the order of a query's sums depends only on its position, and
not on how the prompt was split, what was cached, or the rest of the batch. Masked tokens count
exactly 0.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numba import int32, int64, njit, prange

from text_generation_shard.device.cpu.kernels import MAX_HEAD_DIM, Address, Count, struct_type
from text_generation_shard.device.cpu.kernels.llvm import (
    LANES,
    VECTOR_BYTES,
    address_of,
    array_at,
    call,
    itemsize,
    outlined,
    rounded,
    scratch,
    widened,
)
from text_generation_shard.device.cpu.kernels.softmax import CHUNK, NOTHING, softmax_step
from text_generation_shard.device.cpu.kernels.tile import Pages, paged_tile, tile
from text_generation_shard.device.cpu.kernels.vector import ADDRESS, FLOAT32, STEP_BYTES, inlined

BLOCK_SIZE: Final = LANES
# Most query vectors of one task; those that share a KV head are multiplied with each block
# together.
TASK_ROWS: Final = 8
_CHUNK: Final = CHUNK
_CHUNK_BLOCKS: Final = _CHUNK // BLOCK_SIZE
# Vectors of a task's queries or sums (float32 at most), and of its scores.
_HEAD_VECTORS: Final = TASK_ROWS * MAX_HEAD_DIM // LANES
_CHUNK_VECTORS: Final = TASK_ROWS * _CHUNK_BLOCKS
# Up to this number of tokens, one thread stores keys and values faster than several.
_FEW_TOKENS: Final = 16
_NOTHING: Final = np.float32(NOTHING)


class Attention(NamedTuple):
    """The memory of one layer's attention."""

    # [T, num_heads + 2 * num_kv_heads, head_dim]: scaled queries, then keys, then values.
    heads: Address
    # [T, num_heads * head_dim]: the result.
    out: Address
    # [num_kv_heads, num_blocks]: the layer's blocks, each with keys before values.
    blocks: Address
    num_blocks: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    # Tokens that a query sees, including itself; 0: all.
    window: Count


ATTENTION: Final = struct_type(Attention)


@njit(nogil=True, cache=True)
def store_token(kind: Any, layer: Attention, token: int, slot: int) -> None:
    """`store` for one token."""
    num_heads, num_kv_heads, head_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
    numbers = array_at(kind, layer.heads)
    per_step = STEP_BYTES // itemsize(kind)
    part = head_dim * BLOCK_SIZE
    block, lane = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    value_lane = lane // per_step * LANES * per_step + lane % per_step
    for head in range(num_kv_heads):
        start = (head * layer.num_blocks + block) * 2 * part
        target = array_at(kind, layer.blocks + start * itemsize(kind))
        row = token * (num_heads + 2 * num_kv_heads) + num_heads + head
        key, value = row * head_dim, (row + num_kv_heads) * head_dim
        for feature in range(head_dim):
            step, rest = feature // per_step, feature % per_step
            to = step * LANES * per_step + lane * per_step + rest
            target[to] = _finite(kind, numbers[key + feature])
            panel, column = feature // LANES, feature % LANES
            to = part + panel * LANES * BLOCK_SIZE + value_lane + column * per_step
            target[to] = _finite(kind, numbers[value + feature])


@njit(parallel=True, nogil=True, cache=True)
def store(kind: Any, layer: Attention, slots: Any) -> None:
    """Write the keys and values of T tokens to `slots` [T] of a layer. Values that are not finite
    are written as 0, so that a masked slot can be multiplied by 0."""
    if len(slots) > _FEW_TOKENS:
        for token in prange(len(slots)):
            store_token(kind, layer, token, slots[token])
    else:
        for token in range(len(slots)):
            store_token(kind, layer, token, slots[token])


@inlined
def _finite(kind: Any, number: Any) -> Any:
    wide = widened(kind, number)
    # False for NaN as well.
    return number if abs(wide) <= np.float32(3.4e38) else rounded(kind, np.float32(0.0))


def task_signature(kind: Any) -> tuple[Any, ...]:
    """Signature of `attend_task` for rows of this type."""
    return kind, ATTENTION, int64, int64[::1], int64[::1]


def task_code(kind: Any) -> int:
    """Address of `attend_task`."""
    return address_of(attend_task, task_signature(kind))


@njit(parallel=True, nogil=True, cache=True, boundscheck=False, error_model="numpy")
def attend(kind: Any, code: int, layer: Attention, block_tables: Any, tasks: Any) -> None:
    """Compute all tasks.

    code: address of `attend_task` for this kind, see `llvm.call`. block_tables [R, width]. tasks
    [N, 5]: row, first token of the row in this pass and its position, first query vector of the
    task, and number of query vectors of the row. The query vectors of a token are those that share
    a KV head.
    """
    for index in prange(len(tasks) * layer.num_kv_heads):
        task, head = index // layer.num_kv_heads, np.int64(index % layer.num_kv_heads)
        call(code, (kind, layer, head, block_tables[tasks[task, 0]], tasks[task]))


class _State(NamedTuple):
    """Addresses of a task's buffers, row by row; uninitialized on entry."""

    # Query vectors, contiguous.
    queries: Address
    # [rows, head_dim] float32: sums of weighted values.
    sums: Address
    # [rows, 64]: scores (float32) and weights of the tokens of a chunk.
    scores: Address
    weights: Address
    # [rows] and [rows, 16] float32: see `softmax_step`.
    best: Address
    totals: Address
    # [rows] int64: positions.
    positions: Address
    # Addresses of the values of each block of a chunk.
    pages: Address


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def attend_task(kind: Any, layer: Attention, head: int, table: Any, task: Any) -> None:
    """`attend` for one task and one KV head; table: the row's block table."""
    state = _State(
        scratch(_HEAD_VECTORS),
        scratch(_HEAD_VECTORS),
        scratch(_CHUNK_VECTORS),
        scratch(_CHUNK_VECTORS),
        scratch(1),
        scratch(TASK_ROWS),
        scratch(1),
        scratch(1),
    )
    count, stride = min(TASK_ROWS, task[4] - task[3]), layer.head_dim * itemsize(kind)
    rows = _padded(count)
    _begin(kind, layer, head, task, state, count)
    positions = array_at(ADDRESS, state.positions)
    pages = array_at(ADDRESS, state.pages)
    blocks = layer.blocks + head * layer.num_blocks * 2 * stride * BLOCK_SIZE
    first, last = positions[0], positions[count - 1]
    seen_from = max(0, first - layer.window + 1) if layer.window else 0
    block_bytes = 2 * stride * BLOCK_SIZE
    for chunk in range(seen_from // _CHUNK, last // _CHUNK + 1):
        used = min(_CHUNK_BLOCKS, last // BLOCK_SIZE + 1 - chunk * _CHUNK_BLOCKS)
        base = chunk * _CHUNK_BLOCKS
        keys = (
            blocks + table[base] * block_bytes,
            blocks + table[base + min(1, used - 1)] * block_bytes,
            blocks + table[base + min(2, used - 1)] * block_bytes,
            blocks + table[base + min(3, used - 1)] * block_bytes,
        )
        _score(kind, rows, keys, state.queries, stride, state.scores)
        _softmax_rows(kind, layer, state, count, chunk * _CHUNK)
        for block in range(used):
            pages[block] = keys[block] + stride * BLOCK_SIZE
        _collect(kind, rows, state.pages, used, state.weights, layer.head_dim, state.sums)
    _end(kind, layer, head, task, state, count)


@njit(inline="always")
def _begin(kind: Any, layer: Attention, head: int, task: Any, state: _State, count: int) -> None:
    """Copy `count` query vectors, compute their positions, and clear the sums. The padding vectors
    of a tile stay uninitialized; their results are not used."""
    best, totals = array_at(FLOAT32, state.best), array_at(FLOAT32, state.totals)
    sums, positions = array_at(FLOAT32, state.sums), array_at(ADDRESS, state.positions)
    group, width = layer.num_heads // layer.num_kv_heads, layer.num_heads + 2 * layer.num_kv_heads
    source, target = array_at(kind, layer.heads), array_at(kind, state.queries)
    for row in range(_padded(count)):
        best[row] = _NOTHING
        for lane in range(LANES):
            totals[row * LANES + lane] = np.float32(0.0)
        for feature in range(layer.head_dim):
            sums[row * layer.head_dim + feature] = np.float32(0.0)
    for row in range(count):
        token, member = (task[3] + row) // group, (task[3] + row) % group
        positions[row] = task[2] + token
        start = (task[1] + token) * width + head * group + member
        for feature in range(layer.head_dim):
            target[row * layer.head_dim + feature] = source[start * layer.head_dim + feature]


@njit(inline="always")
def _softmax_rows(kind: Any, layer: Attention, state: _State, count: int, start: int) -> None:
    """Convert the scores of a chunk, whose first token is at `start`, to weights."""
    sums, positions = array_at(FLOAT32, state.sums), array_at(ADDRESS, state.positions)
    for row in range(count):
        position = positions[row]
        begin = max(0, position - layer.window + 1) if layer.window else 0
        shrink = softmax_step(
            kind,
            state.scores + row * _CHUNK * 4,
            state.weights + row * _CHUNK * itemsize(kind),
            state.best + row * 4,
            state.totals + row * VECTOR_BYTES,
            begin - start,
            position - start,
        )
        if shrink != np.float32(1.0):
            for feature in range(layer.head_dim):
                sums[row * layer.head_dim + feature] *= shrink


@njit(inline="always")
def _end(kind: Any, layer: Attention, head: int, task: Any, state: _State, count: int) -> None:
    """Divide the sums by the total weights, and store the result."""
    sums, totals = array_at(FLOAT32, state.sums), array_at(FLOAT32, state.totals)
    group, target = layer.num_heads // layer.num_kv_heads, array_at(kind, layer.out)
    for row in range(count):
        token, member = (task[3] + row) // group, (task[3] + row) % group
        start = (task[1] + token) * layer.num_heads + head * group + member
        total = np.float32(0.0)
        for lane in range(LANES):
            total += totals[row * LANES + lane]
        for feature in range(layer.head_dim):
            value = sums[row * layer.head_dim + feature] / total
            target[start * layer.head_dim + feature] = rounded(kind, value)


@inlined
def _padded(count: int) -> int:
    return 8 if count > 4 else 4 if count > 1 else 1


_TILE_1, _TILE_4, _TILE_8 = tile(1, 4), tile(4, 4), tile(8, 2)


@njit(inline="always")
def _score(kind: Any, rows: int, keys: Any, queries: int, stride: int, scores: int) -> None:
    """Compute scores [rows, 64] of the queries with the keys of four blocks."""
    steps, width = stride // STEP_BYTES, _CHUNK * 4
    if rows == 8:
        left, right, behind = (keys[0], keys[1]), (keys[2], keys[3]), scores + 2 * VECTOR_BYTES
        outlined(_TILE_8, (kind, left, queries, stride, steps, scores, width))
        outlined(_TILE_8, (kind, right, queries, stride, steps, behind, width))
    elif rows == 4:
        outlined(_TILE_4, (kind, keys, queries, stride, steps, scores, width))
    else:
        outlined(_TILE_1, (kind, keys, queries, stride, steps, scores, width))


_PAGED_1_1, _PAGED_4_1, _PAGED_8_1 = paged_tile(1, 1), paged_tile(4, 1), paged_tile(8, 1)
_PAGED_1_2, _PAGED_4_2, _PAGED_8_2 = paged_tile(1, 2), paged_tile(4, 2), paged_tile(8, 2)


@njit(inline="always")
def _collect(
    kind: Any, rows: int, pages: int, count: int, weights: int, head_dim: int, sums: int
) -> None:
    """sums [rows, head_dim] += weights [rows, 16 * count] times the values of the pages."""
    panel = BLOCK_SIZE * LANES * itemsize(kind)
    steps = BLOCK_SIZE * itemsize(kind) // STEP_BYTES
    stride, width = _CHUNK * itemsize(kind), head_dim * 4
    last = head_dim // LANES - 1
    for index in range(0, last + 1, 2):
        values = Pages(pages, count, index * panel, panel, steps)
        given = kind, values, weights, stride, sums + index * VECTOR_BYTES, width
        if index == last:
            if rows == 8:
                outlined(_PAGED_8_1, given)
            elif rows == 4:
                outlined(_PAGED_4_1, given)
            else:
                outlined(_PAGED_1_1, given)
        elif rows == 8:
            outlined(_PAGED_8_2, given)
        elif rows == 4:
            outlined(_PAGED_4_2, given)
        else:
            outlined(_PAGED_1_2, given)


PLANNED: Final = (int64[::1], int64[::1], int32[:, ::1], int64[:, ::1], int64, int64)
"""Signature of `plan_rows`."""


@njit(cache=True, boundscheck=False)
def plan_rows(
    rows: Any, starts: Any, token_ids: Any, block_tables: Any, group: int, num_threads: int
) -> Any:
    """Plan a decode pass of the tokens at `starts` [R] of `rows` [R]: ids [R], slots [R], and tasks
    [N, 5] of `attend`, whose rows are those of block_tables; group: query heads per KV head.

    Why it is fast: between two steps the caches are cold, and one compiled call replaces two dozen
    numpy operations. It holds the GIL, because the event loop would keep it for longer than this
    takes.
    """
    input_ids, slots = np.empty_like(rows), np.empty_like(rows)
    for index in range(len(rows)):
        row, start = rows[index], starts[index]
        input_ids[index] = token_ids[row, start]
        block = block_tables[row, start // BLOCK_SIZE]
        slots[index] = block * BLOCK_SIZE + start % BLOCK_SIZE
    parts = -(-group // TASK_ROWS)
    tasks = np.empty((len(rows) * parts, 5), np.int64)
    # From the longest, the tasks are dealt to the threads' contiguous parts in turn.
    order = np.argsort(-starts, kind="mergesort")
    count = 0
    for thread in range(num_threads):
        for index in range(thread, len(tasks), num_threads):
            row, task = order[index // parts], tasks[count]
            task[0], task[1], task[2] = rows[row], row, starts[row]
            task[3], task[4] = index % parts * TASK_ROWS, group
            count += 1
    return input_ids, slots, tasks
