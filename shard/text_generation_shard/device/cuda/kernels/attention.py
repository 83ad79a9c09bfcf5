"""Attention over the paged cache: keys and values are stored, rows with one token are computed in
splits of fixed size (Flash-Decoding, Dao et al. 2023), prompts in tiles (FlashAttention-2, Dao
2023).

Keys and values may be kept in float8 without a scale: float8_e4m3fn or float8_e5m2 (Micikevicius et
al. 2022). Computations use the dtype of the queries.
"""

import triton
import triton.language as tl

# Scores are multiplied by it, so that all powers have base 2.
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _to_cache(values, kind: tl.constexpr):
    """Convert values to the cache dtype `kind`. float8: round to nearest, ties to even; saturate;
    NaN stays NaN."""
    if kind == tl.float8e4nv:
        return _rounded(values, 1 << 20, 7, 14, 448.0).to(kind, bitcast=True)
    elif kind == tl.float8e5:
        return _rounded(values, 1 << 21, 15, 7, 57344.0).to(kind, bitcast=True)
    else:
        tl.static_assert(values.dtype == kind)
        return values


@triton.jit
def _rounded(
    values, UNIT: tl.constexpr, BIAS: tl.constexpr, SHIFT: tl.constexpr, LARGEST: tl.constexpr
):
    """Round values to float8 bits. UNIT: the last bit of a float8 within the bits of a float32.
    SHIFT: one unit in the last place of 2^SHIFT is the smallest subnormal. Triton's own conversion
    turns NaN into a number on GPUs without an instruction for it (8.0)."""
    wide = values.to(tl.float32)
    size = tl.minimum(tl.abs(wide), LARGEST)
    bits = size.to(tl.uint32, bitcast=True)
    nearest = bits + (UNIT // 2 - 1) + bits // UNIT % 2
    normal = (nearest - ((127 - BIAS) << 23)) // UNIT
    # Subnormals are multiples of the smallest one.
    shift = tl.full(size.shape, (127 + SHIFT) << 23, tl.uint32)
    small = (size + shift.to(tl.float32, bitcast=True)).to(tl.uint32, bitcast=True) - shift
    code = tl.where(bits < (128 - BIAS) << 23, small, normal)
    code = tl.where(wide != wide, 0x7F, code)
    sign = (wide.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def _from_cache(kept, kind: tl.constexpr):
    """Convert cached values to `kind`, exactly."""
    if kept.dtype == tl.float8e5:
        # float8_e5m2 is the upper half of a float16. Triton's direct conversion to bfloat16 turns
        # NaN into a number.
        kept = kept.to(tl.float16)
    return kept.to(kind)


@triton.jit
def rotate_and_store(
    heads_ptr,
    angles_ptr,
    rows_ptr,
    slots_ptr,
    keys_ptr,
    values_ptr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    KV_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Program (token): rotate queries in place; write rotated keys, and values, to the cache in its
    dtype (see `_to_cache`).

    heads [T, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]; angles [*, 2, HALF] float32, cosines and
    sines; rows [T] of them; slots [T]; keys and values [slots, NUM_KV_HEADS, HEAD_DIM]. Feature i
    is rotated with feature i + HALF; HALF 0: no rotation.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    start = heads_ptr + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    at_slot = slot * (NUM_KV_HEADS * HEAD_DIM)
    kv_head = tl.arange(0, KV_PAD)[:, None]
    feature = tl.arange(0, DIM_PAD)[None, :]
    is_kept = (kv_head < NUM_KV_HEADS) & (feature < HEAD_DIM)
    at = kv_head * HEAD_DIM + feature
    values = tl.load(start + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM + at, mask=is_kept)
    kept: tl.constexpr = keys_ptr.dtype.element_ty
    tl.store(values_ptr + at_slot + at, _to_cache(values, kept), mask=is_kept)
    if HALF * 2 < HEAD_DIM:
        is_plain = is_kept & (feature >= 2 * HALF)
        keys = tl.load(start + NUM_HEADS * HEAD_DIM + at, mask=is_plain)
        tl.store(keys_ptr + at_slot + at, _to_cache(keys, kept), mask=is_plain)
    if HALF > 0:
        head = tl.arange(0, HEADS_PAD)[:, None]
        pair = tl.arange(0, HALF_PAD)[None, :]
        is_pair = pair < HALF
        angle = angles_ptr + tl.load(rows_ptr + token).to(tl.int64) * (2 * HALF) + pair
        cosine = tl.load(angle, mask=is_pair, other=0.0)
        sine = tl.load(angle + HALF, mask=is_pair, other=0.0)
        is_turned = (head < NUM_HEADS + NUM_KV_HEADS) & is_pair
        at = head * HEAD_DIM + pair
        left = tl.load(start + at, mask=is_turned, other=0.0).to(tl.float32)
        right = tl.load(start + at + HALF, mask=is_turned, other=0.0).to(tl.float32)
        kind: tl.constexpr = heads_ptr.dtype.element_ty
        new_left = (left * cosine - right * sine).to(kind)
        new_right = (right * cosine + left * sine).to(kind)
        is_query = is_turned & (head < NUM_HEADS)
        tl.store(start + at, new_left, mask=is_query)
        tl.store(start + at + HALF, new_right, mask=is_query)
        is_key = is_turned & (head >= NUM_HEADS)
        at_key = keys_ptr + at_slot + (head - NUM_HEADS) * HEAD_DIM + pair
        tl.store(at_key, _to_cache(new_left, kept), mask=is_key)
        tl.store(at_key + HALF, _to_cache(new_right, kept), mask=is_key)


@triton.jit(
    do_not_specialize=["table_width"], do_not_specialize_on_alignment=["tables_ptr", "lens_ptr"]
)
def gather(
    keys_ptr,
    values_ptr,
    tables_ptr,
    lens_ptr,
    starts_ptr,
    keys_out_ptr,
    values_out_ptr,
    table_width,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, block of TILE tokens, part of the width): copy keys and values [slots, WIDTH]
    of the lens[row] tokens in blocks tables[row] to [*, WIDTH] of any dtype, from index
    starts[row]."""
    row = tl.program_id(0)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_token = token < tl.load(lens_ptr + row)
    block = tl.load(tables_ptr + row * table_width + token // TILE, mask=is_token, other=0)
    slot = block.to(tl.int64) * TILE + token % TILE
    place = tl.load(starts_ptr + row).to(tl.int64) + token
    feature = tl.program_id(2) * PART + tl.arange(0, PART)
    is_there = is_token[:, None] & (feature < WIDTH)[None, :]
    source = slot[:, None] * WIDTH + feature[None, :]
    target = place[:, None] * WIDTH + feature[None, :]
    kind: tl.constexpr = keys_out_ptr.dtype.element_ty
    keys = _from_cache(tl.load(keys_ptr + source, mask=is_there), kind)
    tl.store(keys_out_ptr + target, keys, mask=is_there)
    values = _from_cache(tl.load(values_ptr + source, mask=is_there), kind)
    tl.store(values_out_ptr + target, values, mask=is_there)


@triton.jit
def _add_tile(scores, values, largest, total, mixed):
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
        keys = _from_cache(keys, query.dtype)
        products = tl.dot(query, tl.trans(keys), input_precision="ieee")
        scores = products * SCALE * _LOG2_E
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        values = tl.load(values_ptr + at[:, None] + feature[None, :], mask=is_loaded, other=0.0)
        values = _from_cache(values, query.dtype)
        largest, total, mixed = _add_tile(scores, values, largest, total, mixed)
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

    heads [T, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]; keys, values and tables: see
    `attend_split`; starts [R + 1] and lens [R] int32; out [T, NUM_HEADS * HEAD_DIM].
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
        keys = _from_cache(keys, query.dtype)
        products = tl.dot(query, keys, input_precision="ieee")
        scores = products * SCALE * _LOG2_E
        is_seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            is_seen &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(is_seen, scores, float("-inf"))
        values = tl.load(
            values_ptr + at[:, None] + feature[None, :],
            mask=is_key[:, None] & is_feature[None, :],
            other=0.0,
        )
        values = _from_cache(values, query.dtype)
        largest, total, mixed = _add_tile(scores, values, largest, total, mixed)
    # Padding queries may see no key; their results are not stored.
    total = tl.where(total > 0.0, total, 1.0)
    at_out = (token * NUM_HEADS + head) * HEAD_DIM
    tl.store(
        out_ptr + at_out[:, None] + feature[None, :],
        (mixed / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=is_query,
    )
