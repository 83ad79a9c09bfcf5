"""Norm, gate, and products of hidden states with float weights, or with int8 or int4 weights
dequantized in registers.

The sum over the inputs is never split and has one order: a row's result depends, bit for bit, only
on the row, the weight and the tile sizes. Weights are the left operand, so that tensor cores take
them from registers and a tile of few rows is narrow.
"""

import triton
import triton.language as tl

# 1.5 * 2 ** 23 as float32 bits, and as a number.
_SHIFT_BITS: tl.constexpr = tl.constexpr(0x4B400000)
_SHIFT: tl.constexpr = tl.constexpr(12582912.0)
_GROUP: tl.constexpr = tl.constexpr(32)


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    hidden_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Program (tile of rows, tile of outputs): out [num_rows, NUM_OUTPUTS] = hidden [num_rows,
    NUM_INPUTS] @ weight.t() + bias [NUM_OUTPUTS], which may be None.

    weight [NUM_OUTPUTS, NUM_INPUTS] in the type of hidden, scales None; or in int8, with scales
    [NUM_OUTPUTS]. IS_GROUPED: in 4 bits, with scales and zeros of groups: see `_add_block`.
    """
    # Consecutive programs read the same weights.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = (row < num_rows)[None, :], (output < NUM_OUTPUTS)[:, None]
    hidden_ptr += row.to(tl.int64)[None, :] * NUM_INPUTS
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if IS_GROUPED:
        NUM_BLOCKS: tl.constexpr = (NUM_INPUTS + INPUTS - 1) // INPUTS
        at = output.to(tl.int64)[:, None] * NUM_BLOCKS
        for block in range(NUM_BLOCKS):
            total = _add_block(
                total,
                hidden_ptr,
                weight_ptr,
                scales_ptr,
                at + block,
                block * INPUTS,
                is_row,
                is_output,
                NUM_INPUTS,
                INPUTS,
            )
    else:
        weight_ptr += output.to(tl.int64)[:, None] * NUM_INPUTS
        for start in range(0, NUM_INPUTS, INPUTS):
            input = start + tl.arange(0, INPUTS)
            is_weight = is_output & (input < NUM_INPUTS)[None, :]
            weight = tl.load(weight_ptr + input[None, :], mask=is_weight, other=0)
            total = _add(total, weight, hidden_ptr, input, is_row, NUM_INPUTS)
        if scales_ptr is not None:
            total *= tl.load(scales_ptr + output, mask=output < NUM_OUTPUTS).to(tl.float32)[:, None]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + output, mask=output < NUM_OUTPUTS).to(tl.float32)[:, None]
    at_out = row.to(tl.int64)[None, :] * NUM_OUTPUTS + output[:, None]
    tl.store(out_ptr + at_out, total.to(out_ptr.dtype.element_ty), mask=is_row & is_output)


@triton.jit
def _add(total, weight, hidden_ptr, input, is_row, NUM_INPUTS: tl.constexpr):
    """total [OUTPUTS, ROWS] + weight [OUTPUTS, inputs] @ hidden; weight: float32, or a type that
    is exact in the type of hidden."""
    is_hidden = is_row & (input < NUM_INPUTS)[:, None]
    hidden = tl.load(hidden_ptr + input[:, None], mask=is_hidden, other=0.0)
    if weight.dtype == tl.int8:
        # Integers up to 127 are exact in every float dtype: the scale is applied last.
        weight = _floats(weight.to(tl.int32))
    return tl.dot(weight.to(hidden.dtype), hidden, total, input_precision="ieee")


@triton.jit
def _add_block(
    total,
    hidden_ptr,
    weight_ptr,
    scales_ptr,
    at,
    first,
    is_row,
    is_output,
    NUM_INPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """`_add` for an int4 block of INPUTS from input `first`; `at` [OUTPUTS, 1]: index of the block.
    w = scale * (q - 8) + zero.

    weight [NUM_OUTPUTS, blocks, INPUTS / 2] uint8: q of the first half of a block in the low bits,
    of the second half in the high ones. scales [NUM_OUTPUTS, blocks, INPUTS / 2 / 32, 2, 2]: for
    each group of 32 inputs of a half, both halves, scale and zero. The last block is padded.
    """
    HALF: tl.constexpr = INPUTS // 2
    GROUPS: tl.constexpr = HALF // _GROUP
    input = first + tl.arange(0, HALF)
    at_packed = at * HALF + tl.arange(0, HALF)[None, :]
    packed = tl.load(weight_ptr + at_packed, mask=is_output, other=0).to(tl.int32)
    group = tl.arange(0, GROUPS)[None, :, None, None]
    half, kind = tl.arange(0, 2)[None, None, :, None], tl.arange(0, 2)[None, None, None, :]
    at_scales = (at * GROUPS)[:, :, None, None] + group
    is_there = is_output[:, :, None, None]
    both = tl.load(scales_ptr + at_scales * 4 + half * 2 + kind, mask=is_there, other=0.0)
    scales, zeros = tl.split(both.to(tl.float32))
    low_scales, high_scales = tl.split(scales)
    low_zeros, high_zeros = tl.split(zeros)
    low = _dequantized(packed & 15, low_scales, low_zeros)
    total = _add(total, low, hidden_ptr, input, is_row, NUM_INPUTS)
    high = _dequantized(packed >> 4, high_scales, high_zeros)
    return _add(total, high, hidden_ptr, input + HALF, is_row, NUM_INPUTS)


@triton.jit
def _dequantized(numbers, scales, zeros):
    """Dequantize values [OUTPUTS, inputs] from 0 to 15, with scales and zeros [OUTPUTS, inputs /
    32], to float32."""
    SHAPE: tl.constexpr = numbers.shape
    wide = _floats(numbers - 8)
    wide = tl.reshape(wide, [SHAPE[0], SHAPE[1] // _GROUP, _GROUP])
    return tl.reshape(wide * scales[:, :, None] + zeros[:, :, None], SHAPE)


@triton.jit
def _floats(numbers):
    """Convert int32 between -2 ** 22 and 2 ** 22 to float32 by two additions, because conversion
    instructions have a lower throughput."""
    return (numbers + _SHIFT_BITS).to(tl.float32, bitcast=True) - _SHIFT


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
