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
from numba import njit

from text_generation_shard.device.cpu.kernels import (
    MAX_HEAD_DIM,
    Address,
    Count,
    llvm,
    vector,
)
from text_generation_shard.device.cpu.kernels.llvm import FLOATS, INTS, LANES, VECTOR_BYTES
from text_generation_shard.device.cpu.kernels.tile import Pages, by_size, paged_tile, tile
from text_generation_shard.device.cpu.kernels.vector import ADDRESS, FLOAT32, STEP_BYTES

BLOCK_SIZE: Final = LANES
# Most query vectors of one task; those that share a KV head are multiplied with each block
# together.
TASK_ROWS: Final = 8
# Scores per step of the softmax.
_CHUNK: Final = 64
_CHUNK_BLOCKS: Final = _CHUNK // BLOCK_SIZE
# Vectors of a task's queries or sums (float32 at most), and of its scores.
_HEAD_VECTORS: Final = TASK_ROWS * MAX_HEAD_DIM // LANES
_CHUNK_VECTORS: Final = TASK_ROWS * _CHUNK_BLOCKS
# Fields of a task, see `Attention`.
TASK_FIELDS: Final = 6
# Up to this number of tokens, one thread stores keys and values faster than several.
FEW_TOKENS: Final = 16
# Lower than any score, and finite, so that differences are numbers.
_NOTHING: Final = -1e30
# Numerators up to e ** 8 are as exact as those up to 1, so the reference rarely moves (as in
# FlashAttention 4); moving it requires the maximum within a vector.
_HEADROOM: Final = np.float32(8.0)
_LANE_NUMBERS: Final[Any] = llvm.Table(INTS, range(LANES))


class Attention(NamedTuple):
    """The memory of one layer's attention in a pass."""

    kind: Any
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
    # int64: [T] slot of each token; [*, width] block tables; [N, 6] tasks: row of the table, first
    # token of the row in this pass and its position, first query vector of the task, end of its
    # row's query vectors, and the number of tokens by which the result moves towards the start of
    # `out`. The query vectors of a token are those that share a KV head.
    slots: Address
    tables: Address
    width: Count
    tasks: Address


@njit(nogil=True, cache=True)
def store_token(layer: Attention, token: int) -> None:
    """Write a token's keys and values to its slot. Values that are not finite are written as 0, so
    that a masked slot can be multiplied by 0."""
    kind, slot = layer.kind, llvm.array_at(ADDRESS, layer.slots)[token]
    num_heads, num_kv_heads, head_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
    numbers = llvm.array_at(kind, layer.heads)
    per_step = STEP_BYTES // llvm.itemsize(kind)
    part = head_dim * BLOCK_SIZE
    block, lane = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    value_lane = lane // per_step * LANES * per_step + lane % per_step
    for head in range(num_kv_heads):
        start = (head * layer.num_blocks + block) * 2 * part
        target = llvm.array_at(kind, layer.blocks + start * llvm.itemsize(kind))
        row = token * (num_heads + 2 * num_kv_heads) + num_heads + head
        key, value = row * head_dim, (row + num_kv_heads) * head_dim
        for feature in range(head_dim):
            step, rest = feature // per_step, feature % per_step
            to = step * LANES * per_step + lane * per_step + rest
            target[to] = _finite(kind, numbers[key + feature])
            panel, column = feature // LANES, feature % LANES
            to = part + panel * LANES * BLOCK_SIZE + value_lane + column * per_step
            target[to] = _finite(kind, numbers[value + feature])


@vector.inlined
def _finite(kind: Any, number: Any) -> Any:
    wide = llvm.widened(kind, number)
    # False for NaN as well.
    return number if abs(wide) <= np.float32(3.4e38) else llvm.rounded(kind, np.float32(0.0))


class _State(NamedTuple):
    """Addresses of a task's buffers, row by row; uninitialized on entry."""

    # Query vectors, contiguous.
    queries: Address
    # [rows, head_dim] float32: sums of weighted values.
    sums: Address
    # [rows, 64]: scores (float32) and weights of the tokens of a chunk.
    scores: Address
    weights: Address
    # [rows] and [rows, 16] float32: see `_softmax_step`.
    best: Address
    totals: Address
    # [rows] int64: positions.
    positions: Address
    # Addresses of the values of each block of a chunk.
    pages: Address


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def attend_task(layer: Attention, index: int) -> None:
    """Compute a task for one KV head."""
    kind, head = layer.kind, index % layer.num_kv_heads
    task = llvm.array_at(ADDRESS, layer.tasks + index // layer.num_kv_heads * TASK_FIELDS * 8)
    table = llvm.array_at(ADDRESS, layer.tables + task[0] * layer.width * 8)
    state = _State(
        llvm.scratch(_HEAD_VECTORS),
        llvm.scratch(_HEAD_VECTORS),
        llvm.scratch(_CHUNK_VECTORS),
        llvm.scratch(_CHUNK_VECTORS),
        llvm.scratch(1),
        llvm.scratch(TASK_ROWS),
        llvm.scratch(1),
        llvm.scratch(1),
    )
    count, stride = min(TASK_ROWS, task[4] - task[3]), layer.head_dim * llvm.itemsize(kind)
    rows = _padded(count)
    _begin(kind, layer, head, task, state, count)
    positions = llvm.array_at(ADDRESS, state.positions)
    pages = llvm.array_at(ADDRESS, state.pages)
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
    best, totals = llvm.array_at(FLOAT32, state.best), llvm.array_at(FLOAT32, state.totals)
    sums, positions = llvm.array_at(FLOAT32, state.sums), llvm.array_at(ADDRESS, state.positions)
    group, width = layer.num_heads // layer.num_kv_heads, layer.num_heads + 2 * layer.num_kv_heads
    source, target = llvm.array_at(kind, layer.heads), llvm.array_at(kind, state.queries)
    for row in range(_padded(count)):
        best[row] = np.float32(_NOTHING)
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
    sums, positions = llvm.array_at(FLOAT32, state.sums), llvm.array_at(ADDRESS, state.positions)
    for row in range(count):
        position = positions[row]
        begin = max(0, position - layer.window + 1) if layer.window else 0
        shrink = _softmax_step(
            kind,
            state.scores + row * _CHUNK * 4,
            state.weights + row * _CHUNK * llvm.itemsize(kind),
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
    sums, totals = llvm.array_at(FLOAT32, state.sums), llvm.array_at(FLOAT32, state.totals)
    group, target = layer.num_heads // layer.num_kv_heads, llvm.array_at(kind, layer.out)
    for row in range(count):
        token, member = (task[3] + row) // group, (task[3] + row) % group
        start = (task[1] + token - task[5]) * layer.num_heads + head * group + member
        total = np.float32(0.0)
        for lane in range(LANES):
            total += totals[row * LANES + lane]
        for feature in range(layer.head_dim):
            value = sums[row * layer.head_dim + feature] / total
            target[start * layer.head_dim + feature] = llvm.rounded(kind, value)


@vector.inlined
def _softmax_step(
    kind: Any, scores: int, weights: int, best: int, totals: int, low: int, high: int
) -> Any:
    """Compute the numerators of 64 scores of a row; returns the factor for all earlier numerators.

    scores and weights: addresses of 64 float32 and of 64 numbers of the kind. best: address of the
    row's reference score; totals: address of 16 partial sums; both are updated. Scores outside
    `low` to `high` are masked and weigh 0.
    """
    if low <= 0 and high >= _CHUNK - 1:
        return _step(kind, scores, weights, best, totals, np.int64(0), np.int64(_CHUNK - 1))
    return _step(kind, scores, weights, best, totals, low, high)


@vector.inlined
def _step(kind: Any, scores: int, weights: int, best: int, totals: int, low: int, high: int) -> Any:
    # No literals as arguments, so that each function is compiled once.
    step = LANES * llvm.itemsize(kind)
    first = _seen(scores, low, high)
    second = _seen(scores + VECTOR_BYTES, low - LANES, high - LANES)
    third = _seen(scores + 2 * VECTOR_BYTES, low - 2 * LANES, high - 2 * LANES)
    fourth = _seen(scores + 3 * VECTOR_BYTES, low - 3 * LANES, high - 3 * LANES)
    peaks = _larger(_larger(_larger(first, second), third), fourth)
    top, shrink = llvm.array_at(FLOAT32, best)[0], np.float32(1.0)
    if vector.is_any(peaks > top + _HEADROOM):
        # A numerator would become too large: move the reference.
        before, top = llvm.filled(FLOATS, top), vector.largest_of_lanes(peaks)
        llvm.array_at(FLOAT32, best)[0] = top
        shrinks = vector.exponential(kind, before - top)
        llvm.store(llvm.load(FLOATS, totals) * shrinks, totals)
        shrink = vector.first_lane(shrinks)
    total = _weigh(kind, first, low, high, top, weights)
    at = weights + step
    total = total + _weigh(kind, second, low - LANES, high - LANES, top, at)
    at += step
    total = total + _weigh(kind, third, low - 2 * LANES, high - 2 * LANES, top, at)
    at += step
    total = total + _weigh(kind, fourth, low - 3 * LANES, high - 3 * LANES, top, at)
    llvm.store(llvm.load(FLOATS, totals) + total, totals)
    return shrink


@vector.inlined
def _are_seen(low: int, high: int) -> Any:
    """A mask of lanes from `low` to `high`."""
    lanes = _LANE_NUMBERS
    return (lanes >= low) & (lanes <= high)


@vector.inlined
def _seen(scores: int, low: int, high: int) -> Any:
    """Load 16 scores; NOTHING where masked."""
    return llvm.chosen(_are_seen(low, high), llvm.load(FLOATS, scores), _NOTHING)


@vector.inlined
def _weigh(kind: Any, value: Any, low: int, high: int, top: Any, weights: int) -> Any:
    """Compute the numerators of 16 scores, and store them as weights."""
    weight = llvm.chosen(_are_seen(low, high), vector.exponential(kind, value - top), 0.0)
    vector.store_numbers(kind, weight, weights, LANES)
    return weight


@vector.inlined
def _larger(left: Any, right: Any) -> Any:
    return llvm.chosen(left > right, left, right)


@vector.inlined
def _padded(count: int) -> int:
    return 8 if count > 4 else 4 if count > 1 else 1


_WIDE_TILE: Final = tile(8, 2)
_by_rows_of_4: Final = by_size({rows: tile(rows, 4) for rows in (4, 1)})


@njit(inline="always")
def _score(kind: Any, rows: int, keys: Any, queries: int, stride: int, scores: int) -> None:
    """Compute scores [rows, 64] of the queries with the keys of four blocks."""
    steps, width = stride // STEP_BYTES, _CHUNK * 4
    if rows == 8:
        left, right, behind = (keys[0], keys[1]), (keys[2], keys[3]), scores + 2 * VECTOR_BYTES
        llvm.outlined(_WIDE_TILE, (kind, left, queries, stride, steps, scores, width))
        llvm.outlined(_WIDE_TILE, (kind, right, queries, stride, steps, behind, width))
    else:
        _by_rows_of_4(rows, (kind, keys, queries, stride, steps, scores, width))


_by_rows_of_1: Final = by_size({rows: paged_tile(rows, 1) for rows in (8, 4, 1)})
_by_rows_of_2: Final = by_size({rows: paged_tile(rows, 2) for rows in (8, 4, 1)})


@njit(inline="always")
def _collect(
    kind: Any, rows: int, pages: int, count: int, weights: int, head_dim: int, sums: int
) -> None:
    """sums [rows, head_dim] += weights [rows, 16 * count] times the values of the pages."""
    panel = BLOCK_SIZE * LANES * llvm.itemsize(kind)
    steps = BLOCK_SIZE * llvm.itemsize(kind) // STEP_BYTES
    stride, width = _CHUNK * llvm.itemsize(kind), head_dim * 4
    last = head_dim // LANES - 1
    for index in range(0, last + 1, 2):
        values = Pages(pages, count, index * panel, panel, steps)
        given = kind, values, weights, stride, sums + index * VECTOR_BYTES, width
        if index == last:
            _by_rows_of_1(rows, given)
        else:
            _by_rows_of_2(rows, given)
