"""Conversion of keys and values to and from a float8 cache, without a scale: float8_e4m3fn or
float8_e5m2 (Micikevicius et al. 2022). Computations use the dtype of the queries."""

import triton
import triton.language as tl


@triton.jit
def to_cache(values, kind: tl.constexpr):
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
def from_cache(kept, kind: tl.constexpr):
    """Convert cached values to `kind`, exactly."""
    if kept.dtype == tl.float8e5:
        # float8_e5m2 is the upper half of a float16. Triton's direct conversion to bfloat16 turns
        # NaN into a number.
        kept = kept.to(tl.float16)
    return kept.to(kind)
