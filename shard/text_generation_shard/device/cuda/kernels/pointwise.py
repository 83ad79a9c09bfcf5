"""Kernels between the products of a layer: norm, rotation, cache writes, gate."""

import triton
import triton.language as tl

from text_generation_shard.device.cuda.kernels.float8 import from_cache, to_cache


@triton.jit
def add_norm(
    hidden_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    multiplier,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    EPS: tl.constexpr,
):
    """Program (row): hidden [T, SIZE] += delta * multiplier, in place and rounded to its type; out
    = hidden / rms(hidden) * weight. delta may be None; weight [SIZE] float32."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, SIZE_PAD)
    is_feature = feature < SIZE
    at = row * SIZE + feature
    hidden = tl.load(hidden_ptr + at, mask=is_feature, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + at, mask=is_feature, other=0.0).to(tl.float32)
        hidden = (hidden.to(tl.float32) + delta * multiplier).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + at, hidden, mask=is_feature)
    wide = hidden.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + EPS)
    weight = tl.load(weight_ptr + feature, mask=is_feature, other=0.0)
    normed = wide * inverse * weight
    tl.store(out_ptr + at, normed.to(out_ptr.dtype.element_ty), mask=is_feature)


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
    dtype (see `float8`).

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
    tl.store(values_ptr + at_slot + at, to_cache(values, kept), mask=is_kept)
    if HALF * 2 < HEAD_DIM:
        is_plain = is_kept & (feature >= 2 * HALF)
        keys = tl.load(start + NUM_HEADS * HEAD_DIM + at, mask=is_plain)
        tl.store(keys_ptr + at_slot + at, to_cache(keys, kept), mask=is_plain)
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
        tl.store(at_key, to_cache(new_left, kept), mask=is_key)
        tl.store(at_key + HALF, to_cache(new_right, kept), mask=is_key)


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
    keys = from_cache(tl.load(keys_ptr + source, mask=is_there), kind)
    tl.store(keys_out_ptr + target, keys, mask=is_there)
    values = from_cache(tl.load(values_ptr + source, mask=is_there), kind)
    tl.store(values_out_ptr + target, values, mask=is_there)


@triton.jit
def gate(both_ptr, out_ptr, SIZE: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Program (row, tile): out [T, SIZE] = activation(both[:, :SIZE]) * both[:, SIZE:]."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_feature = feature < SIZE
    at = both_ptr + row * (2 * SIZE) + feature
    gates = tl.load(at, mask=is_feature, other=0.0).to(tl.float32)
    ups = tl.load(at + SIZE, mask=is_feature, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gates = gates / (1.0 + tl.exp(-gates))
    elif ACTIVATION == "gelu":
        gates = gates * 0.5 * (1.0 + tl.erf(gates * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # x * (1 + tanh(y)) / 2 is x * sigmoid(2 * y).
        doubled = 1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)
        gates = gates / (1.0 + tl.exp(-doubled))
    else:
        tl.static_assert(ACTIVATION == "relu")
        gates = tl.maximum(gates, 0.0)
    out = (gates * ups).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + feature, out, mask=is_feature)


@triton.jit
def quantize_rows(hidden_ptr, numbers_ptr, scales_ptr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr):
    """Program (row): quantize hidden [T, SIZE] to numbers [T, SIZE] float8_e4m3fn and scales [T]
    float32. The largest value of a row becomes 448, the largest float8_e4m3fn."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, SIZE_PAD)
    is_feature = feature < SIZE
    at = row * SIZE + feature
    hidden = tl.load(hidden_ptr + at, mask=is_feature, other=0.0).to(tl.float32)
    # The scale of a row of zeros must be a valid divisor.
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(hidden), 0), 1e-30), 448.0)
    numbers = tl.div_rn(hidden, tl.zeros([SIZE_PAD], tl.float32) + scale)
    tl.store(numbers_ptr + at, numbers.to(tl.float8e4nv), mask=is_feature)
    tl.store(scales_ptr + row, scale)
