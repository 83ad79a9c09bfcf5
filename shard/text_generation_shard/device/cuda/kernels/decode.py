"""Attention of rows with one token over the paged cache, in splits of fixed size (Flash-Decoding,
Dao et al. 2023). A row's result does not depend on the other rows or their number."""

import triton
import triton.language as tl

from text_generation_shard.device.cuda.kernels.float8 import from_cache

# Scores are multiplied by it, so that all powers have base 2.
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def add_tile(scores, values, largest, total, mixed):
    """One step of an online softmax (Milakov and Gimelshein 2018): add the values [N, D] of a tile
    with scores [M, N], -inf where a key is masked, to the state of each query: largest score [M],
    sum of weights [M], sum of weighted values [M, D]. Returns the new state."""
    larger = tl.maximum(largest, tl.max(scores, 1))
    # All keys so far may be masked.
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    shrunk = tl.exp2(largest - shift)
    weights = tl.exp2(scores - shift[:, None])
    product = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return larger, total * shrunk + tl.sum(weights, 1), mixed * shrunk[:, None] + product


@triton.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["tables_ptr", "lens_ptr", "owners_ptr"],
)
def attend_split(
    heads_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lens_ptr,
    owners_ptr,
    parts_ptr,
    sums_ptr,
    table_width,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (row, KV head, split): attention of the query heads of one KV head over SPLIT tokens.

    heads [R, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]; keys and values [blocks, BLOCK, NUM_KV_HEADS,
    HEAD_DIM] in the type of the heads or in 8 bits; lens [R] int32; tables [*, table_width] int32,
    indexed by row or by owners [R] int32. Writes parts [R, splits, NUM_HEADS, HEAD_DIM] and sums
    [R, splits, NUM_HEADS]: log2 of the sum of weights, -inf if no token is seen.
    """
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    length = tl.load(lens_ptr + row)
    owner = row
    if owners_ptr is not None:
        owner = tl.load(owners_ptr + row)
    first = split * SPLIT
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - WINDOW, 0)
    member = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + member
    feature = tl.arange(0, DIM_PAD)
    is_head = member < GROUP
    is_feature = feature < HEAD_DIM
    at_part = (row * tl.num_programs(2) + split) * NUM_HEADS + head
    if (first >= length) | (first + SPLIT <= low):
        tl.store(sums_ptr + at_part, tl.full([GROUP_PAD], float("-inf"), tl.float32), mask=is_head)
        return
    at_query = row.to(tl.int64) * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + head * HEAD_DIM
    query = tl.load(
        heads_ptr + at_query[:, None] + feature[None, :],
        mask=is_head[:, None] & is_feature[None, :],
        other=0.0,
    )
    largest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    mixed = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    end = tl.minimum(first + SPLIT, length)
    for start in range(tl.maximum(first, low // TILE * TILE), end, TILE):
        token = start + tl.arange(0, TILE)
        is_seen = (token < end) & (token >= low)
        block = tl.load(tables_ptr + owner * table_width + token // BLOCK, mask=is_seen, other=0)
        slot = block.to(tl.int64) * BLOCK + token % BLOCK
        at = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM
        is_loaded = is_seen[:, None] & is_feature[None, :]
        keys = tl.load(keys_ptr + at[:, None] + feature[None, :], mask=is_loaded, other=0.0)
        keys = from_cache(keys, query.dtype)
        products = tl.dot(query, tl.trans(keys), input_precision="ieee")
        scores = products * SCALE * LOG2_E
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        values = tl.load(values_ptr + at[:, None] + feature[None, :], mask=is_loaded, other=0.0)
        values = from_cache(values, query.dtype)
        largest, total, mixed = add_tile(scores, values, largest, total, mixed)
    tl.store(
        parts_ptr + at_part[:, None].to(tl.int64) * HEAD_DIM + feature[None, :],
        mixed / total[:, None],
        mask=is_head[:, None] & is_feature[None, :],
    )
    tl.store(sums_ptr + at_part, largest + tl.log2(total), mask=is_head)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["lens_ptr"])
def merge_splits(
    parts_ptr,
    sums_ptr,
    lens_ptr,
    out_ptr,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (row, head): merge the results of `attend_split` in the order of the splits. out [R,
    NUM_HEADS * HEAD_DIM]."""
    row, head = tl.program_id(0), tl.program_id(1)
    feature = tl.arange(0, DIM_PAD)
    is_feature = feature < HEAD_DIM
    largest = -float("inf")
    total = 0.0
    mixed = tl.zeros([DIM_PAD], tl.float32)
    for split in range(0, tl.cdiv(tl.load(lens_ptr + row), SPLIT)):
        at = (row * num_splits + split) * NUM_HEADS + head
        summed = tl.load(sums_ptr + at)
        # NaN is not skipped: it makes the whole row NaN.
        if summed != -float("inf"):
            larger = tl.maximum(largest, summed)
            shrunk, weight = tl.exp2(largest - larger), tl.exp2(summed - larger)
            part = tl.load(
                parts_ptr + at.to(tl.int64) * HEAD_DIM + feature, mask=is_feature, other=0.0
            )
            mixed = mixed * shrunk + weight * part
            total = total * shrunk + weight
            largest = larger
    at = (row * NUM_HEADS + head) * HEAD_DIM + feature
    tl.store(out_ptr + at, (mixed / total).to(out_ptr.dtype.element_ty), mask=is_feature)
