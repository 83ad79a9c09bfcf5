"""128 scores of a row at once, in vector code: the largest of them, and what they weigh."""

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from text_generation_shard.device.cpu.kernels.llvm import FLOAT, INT32, call

BLOCK: Final = 128
"""Neighbouring scores that are looked at together."""

_FLOATS: Final = ir.VectorType(FLOAT, BLOCK)
_INTS: Final = ir.VectorType(INT32, BLOCK)
_SUFFIX: Final = f"v{BLOCK}f32"

_LOG2_E: Final = 1.4426950408889634
# ln 2 in two parts, the first with so few bits that its products with small whole numbers are
# exact (Cody & Waite 1980).
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.42860677e-6
# Below it a weight is 0: 2 ** (it / ln 2) is near the smallest normal number.
_LOWEST: Final = -87.0
# The lowest bits of this and a small whole number are that number.
_WHOLE: Final = 1.5 * 2.0**23
# The series of e ** f for f in [-ln 2 / 2, ln 2 / 2] behind 1 + f, highest power first (Cephes).
_SERIES: Final = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


@intrinsic
def largest(typingctx: Any, scores: Any) -> Any:
    """The largest of the 128 float32 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = _load(builder, arguments[0])
        return call(builder, f"llvm.vector.reduce.fmax.{_SUFFIX}", FLOAT, values)

    return types.float32(types.int64), generate


@intrinsic
def weigh(typingctx: Any, scores: Any, highest: Any, weights: Any) -> Any:
    """e ** (score - highest) of the 128 scores at one address, written to another; returns their
    sum. No score is above `highest`; what is far below it weighs 0, and NaN weighs NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, highest, weights = arguments
        vector = ir.Constant(_FLOATS, ir.Undefined)
        first = builder.insert_element(vector, highest, INT32(0))
        tops = builder.shuffle_vector(first, vector, ir.Constant(_INTS, [0] * BLOCK))
        values = _exponential(builder, builder.fsub(_load(builder, scores), tops))
        builder.store(values, builder.inttoptr(weights, _FLOATS.as_pointer()), align=4)
        return _sum(builder, values)

    return types.float32(types.int64, types.float32, types.int64), generate


def _load(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _FLOATS.as_pointer()), align=4)


def _exponential(builder: Any, values: Any) -> Any:
    """e ** value of values <= 0, to 2 units in the last place; NaN of NaN."""
    is_far = builder.fcmp_ordered("<", values, _floats(_LOWEST))
    values = builder.select(is_far, _floats(_LOWEST), values)
    whole = call(builder, f"llvm.rint.{_SUFFIX}", _FLOATS, builder.fmul(values, _floats(_LOG2_E)))
    part = _add_product(builder, values, whole, _floats(-_LN2_HIGH))
    part = _add_product(builder, part, whole, _floats(-_LN2_LOW))
    series = _floats(_SERIES[0])
    for factor in _SERIES[1:]:
        series = _add_product(builder, _floats(factor), series, part)
    rest = _add_product(builder, part, series, builder.fmul(part, part))
    # No conversion: what LLVM makes of NaN there is undefined.
    exponents = builder.bitcast(builder.fadd(whole, _floats(_WHOLE + 127.0)), _INTS)
    powers = builder.shl(exponents, ir.Constant(_INTS, [23] * BLOCK))
    weights = builder.fmul(builder.fadd(rest, _floats(1.0)), builder.bitcast(powers, _FLOATS))
    return builder.select(is_far, _floats(0.0), weights)


def _sum(builder: Any, values: Any) -> Any:
    """The sum, halves added to halves: the same order for whichever vectors the processor has."""
    count = BLOCK
    while count > 1:
        count //= 2
        left, right = (
            builder.shuffle_vector(
                values,
                values,
                ir.Constant(ir.VectorType(INT32, count), list(range(first, first + count))),
            )
            for first in (0, count)
        )
        values = builder.fadd(left, right)
    return builder.extract_element(values, INT32(0))


def _add_product(builder: Any, total: Any, left: Any, right: Any) -> Any:
    return call(builder, f"llvm.fma.{_SUFFIX}", _FLOATS, left, right, total)


def _floats(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * BLOCK)
