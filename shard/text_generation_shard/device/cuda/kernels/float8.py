"""Keys and values that the cache keeps in 8 bits, without a scale: float8_e4m3fn or float8_e5m2
(Micikevicius et al. 2022). What is computed with them has the type of the queries."""

import triton
import triton.language as tl


@triton.jit
def to_cache(values, kind: tl.constexpr):
    """values as the cache keeps them, in its type kind. 8 bits are the nearest there are, of two
    the even ones; what is beyond the largest number becomes that, and NaN stays NaN."""
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
    """The 8 bits of values, whose last one is worth UNIT in the bits of a float32; the last place
    of 2^SHIFT is the least number there is. Triton's own conversion makes NaN a number where a GPU
    has no instruction for it (8.0)."""
    wide = values.to(tl.float32)
    size = tl.minimum(tl.abs(wide), LARGEST)
    bits = size.to(tl.uint32, bitcast=True)
    nearest = bits + (UNIT // 2 - 1) + bits // UNIT % 2
    normal = (nearest - ((127 - BIAS) << 23)) // UNIT
    # Below the least number of full precision all are multiples of the least number.
    shift = tl.full(size.shape, (127 + SHIFT) << 23, tl.uint32)
    small = (size + shift.to(tl.float32, bitcast=True)).to(tl.uint32, bitcast=True) - shift
    code = tl.where(bits < (128 - BIAS) << 23, small, normal)
    code = tl.where(wide != wide, 0x7F, code)
    sign = (wide.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def from_cache(kept, kind: tl.constexpr):
    """What the cache keeps, in the type kind and exactly."""
    if kept.dtype == tl.float8e5:
        # Half of a float16. Triton's own conversion to bfloat16 makes NaN a number.
        kept = kept.to(tl.float16)
    return kept.to(kind)
