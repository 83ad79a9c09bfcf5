"""Attention of rows with several tokens over the paged cache (FlashAttention-2, Dao 2023)."""

import triton
import triton.language as tl

from text_generation_shard.device.cuda.kernels.decode import LOG2_E, add_tile
from text_generation_shard.device.cuda.kernels.float8 import from_cache


@triton.jit(
    do_not_specialize=["table_width"], do_not_specialize_on_alignment=["tables_ptr", "lens_ptr"]
)
def attend_prompts(
    heads_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    starts_ptr,
    lens_ptr,
    out_ptr,
    table_width,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Program (tile of queries, head, row). A row's queries are tokens starts[row] to starts[row +
    1] of the pass, the last of its lens[row] tokens. All their keys and values are in the cache.

    heads [T, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]; keys, values and tables: see `decode`; starts
    [R + 1] and lens [R] int32; out [T, NUM_HEADS * HEAD_DIM].
    """
    head, row = tl.program_id(1), tl.program_id(2)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    begin = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - begin
    length = tl.load(lens_ptr + row)
    first = tl.program_id(0) * QUERIES
    if first >= count:
        return
    offset = first + tl.arange(0, QUERIES)
    feature = tl.arange(0, DIM_PAD)
    is_feature = feature < HEAD_DIM
    is_query = (offset < count)[:, None] & is_feature[None, :]
    token = (begin + offset).to(tl.int64)
    at_query = (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    query = tl.load(heads_ptr + at_query[:, None] + feature[None, :], mask=is_query, other=0.0)
    position = length - count + offset
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - count + first + 1 - WINDOW, 0) // KEYS * KEYS
    for start in range(low, tl.minimum(length, length - count + first + QUERIES), KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = key < length
        block = tl.load(tables_ptr + row * table_width + key // BLOCK, mask=is_key, other=0)
        slot = block.to(tl.int64) * BLOCK + key % BLOCK
        at = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM
        keys = tl.load(
            keys_ptr + at[None, :] + feature[:, None],
            mask=is_key[None, :] & is_feature[:, None],
            other=0.0,
        )
        keys = from_cache(keys, query.dtype)
        products = tl.dot(query, keys, input_precision="ieee")
        scores = products * SCALE * LOG2_E
        is_seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            is_seen &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(is_seen, scores, float("-inf"))
        values = tl.load(
            values_ptr + at[:, None] + feature[None, :],
            mask=is_key[:, None] & is_feature[None, :],
            other=0.0,
        )
        values = from_cache(values, query.dtype)
        largest, total, mixed = add_tile(scores, values, largest, total, mixed)
    # Padding queries may see no key; their results are not stored.
    total = tl.where(total > 0.0, total, 1.0)
    at_out = (token * NUM_HEADS + head) * HEAD_DIM
    tl.store(
        out_ptr + at_out[:, None] + feature[None, :],
        (mixed / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=is_query,
    )
