"""One step of a softmax that goes along with its scores, in vector code.

Online normaliser calculation (Milakov & Gimelshein 2018): per row the best score so far, and the
sum of the numerators relative to it. Written in LLVM's own terms because a compiler that may not
reorder sums makes scalar code of the horizontal maximum, which took a third of the time of a long
prompt's attention.
"""

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from text_generation_shard.kernels.llvm import (
    FLOAT,
    FLOATS,
    INT32,
    INT64,
    INTS,
    LANES,
    VECTOR_BYTES,
    add_product,
    broadcast,
    call,
    constant,
    round_vector,
)

CHUNK: Final = 64
"""Scores of one step."""
NOTHING: Final = -1e30
"""Lower than any score, and finite, so that differences are numbers."""

# The series of 2 ** f for f in [-0.5, 0.5], highest power first.
_SERIES: Final = (
    1.5403530393381609e-4,
    1.3333558146428443e-3,
    9.618129107628477e-3,
    5.550410866482158e-2,
    2.402265069591007e-1,
    6.931471805599453e-1,
    1.0,
)
_LOG2_E: Final = 1.4426950408889634
# Where 2 ** x is the smallest normal number.
_LOWEST: Final = -126.0


@intrinsic
def soften(
    typingctx: Any,
    kind: Any,
    scores: Any,
    weights: Any,
    low: Any,
    high: Any,
    best: Any,
    totals: Any,
) -> Any:
    """Numerators of 64 scores of one row; returns what all earlier ones are to be multiplied by.

    scores and weights: addresses of 64 float32 and of 64 numbers of the kind. Only places from
    `low` to `high` are seen, the others weigh 0. best: the address of the row's best score, totals:
    that of 16 partial sums; both go along.
    """
    signature = types.float32(kind, *(types.int64,) * 6)
    is_pairs = kind == types.uint16

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, scores, weights, low, high, best, totals = arguments
        values = _masked(builder, scores, low, high)
        best_pointer = builder.inttoptr(best, FLOAT.as_pointer())
        before = builder.load(best_pointer)
        top = _larger(builder, before, _horizontal_max(builder, values))
        builder.store(top, best_pointer)
        tops = broadcast(builder, top)
        total = None
        for place, (value, is_seen) in enumerate(values):
            weight = _exponential(builder, builder.fsub(value, tops))
            weight = builder.select(is_seen, weight, _floats(0.0))
            total = weight if total is None else builder.fadd(total, weight)
            size = VECTOR_BYTES // 2 if is_pairs else VECTOR_BYTES
            address = builder.add(weights, INT64(place * size))
            number = round_vector(builder, weight) if is_pairs else weight
            builder.store(number, builder.inttoptr(address, number.type.as_pointer()), align=4)
        shrinks = _exponential(builder, builder.fsub(broadcast(builder, before), tops))
        totals_pointer = builder.inttoptr(totals, FLOATS.as_pointer())
        earlier = builder.fmul(builder.load(totals_pointer, align=4), shrinks)
        builder.store(builder.fadd(earlier, total), totals_pointer, align=4)
        return builder.extract_element(shrinks, INT32(0))

    return signature, generate


def _masked(builder: Any, scores: Any, low: Any, high: Any) -> list[tuple[Any, Any]]:
    """The scores as vectors, with NOTHING where they are not seen, and where they are."""
    first, last = (broadcast(builder, builder.trunc(limit, INT32)) for limit in (low, high))
    values = []
    for start in range(0, CHUNK, LANES):
        address = builder.add(scores, INT64(start * 4))
        value = builder.load(builder.inttoptr(address, FLOATS.as_pointer()), align=4)
        places = ir.Constant(INTS, list(range(start, start + LANES)))
        is_seen = builder.and_(
            builder.icmp_signed(">=", places, first), builder.icmp_signed("<=", places, last)
        )
        values.append((builder.select(is_seen, value, _floats(NOTHING)), is_seen))
    return values


def _horizontal_max(builder: Any, values: list[tuple[Any, Any]]) -> Any:
    top = values[0][0]
    for value, _ in values[1:]:
        top = _larger(builder, top, value)
    for distance in (8, 4, 2, 1):
        order = ir.Constant(INTS, [(lane + distance) % LANES for lane in range(LANES)])
        top = _larger(builder, top, builder.shuffle_vector(top, top, order))
    return builder.extract_element(top, INT32(0))


def _exponential(builder: Any, value: Any) -> Any:
    """e ** value for a vector of values <= 0, to 2 units in the last place; at least 2 ** -126."""
    value = _larger(builder, builder.fmul(value, _floats(_LOG2_E)), _floats(_LOWEST))
    whole = call(builder, f"llvm.rint.v{LANES}f32", FLOATS, value)
    part = builder.fsub(value, whole)
    series = _floats(_SERIES[0])
    for factor in _SERIES[1:]:
        series = add_product(builder, _floats(factor), series, part)
    exponent = builder.add(builder.fptosi(whole, INTS), constant(127))
    power = builder.shl(exponent, constant(23))
    return builder.fmul(series, builder.bitcast(power, FLOATS))


def _larger(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _floats(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)
