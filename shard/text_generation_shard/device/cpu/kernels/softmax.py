"""One step of a softmax that goes along with its scores, in vector code.

Online normaliser calculation (Milakov & Gimelshein 2018): per row a score near the best so far, and
the sum of the numerators relative to it. Written in LLVM's own terms because a compiler that may
not reorder sums makes scalar code of the maximum, and knows nothing of the instructions that take
2 ** x apart and put it together.
"""

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from text_generation_shard.device.cpu.kernels import are_vectors_wide
from text_generation_shard.device.cpu.kernels.llvm import (
    FLOAT,
    FLOATS,
    INT16,
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

# The series of 2 ** f for f in [0, 1], highest power first; exact at 0, else fitted so that the
# largest relative error is smallest: 9e-5 (a bfloat16 is rounded by up to 2e-3) and 2e-9.
_SERIES: Final = {
    types.uint16: (0.07706706865913662, 0.22764496183962538, 0.6951167931865881, 1.0),
    types.float32: (
        2.161291914548068e-4,
        1.2467845340325193e-3,
        9.675451674202822e-3,
        5.548528057202427e-2,
        2.4022930556094527e-1,
        6.93147044442802e-1,
        1.0,
    ),
}
# Numerators up to e ** 8 are as exact as those up to 1, and so the reference seldom has to move
# (as in FlashAttention 4), for which the maximum within a vector must be found.
_HEADROOM: Final = 8.0
_LOG2_E: Final = 1.4426950408889634
# Where 2 ** x is the smallest normal number.
_LOWEST: Final = -126.0
# Of vreduceps: what is left above the next whole number below; no exceptions.
_ABOVE_FLOOR: Final = 0b1001
_EVERY_LANE: Final = -1
# Of instructions that can be told how to round: as usual.
_AS_USUAL: Final = 4


@intrinsic
def soften(typingctx: Any, kind: Any, scores: Any, weights: Any, best: Any, totals: Any) -> Any:
    """Numerators of 64 scores of one row; returns what all earlier ones are to be multiplied by.

    scores and weights: addresses of 64 float32 and of 64 numbers of the kind. best: the address of
    the score that the row's numerators are relative to, totals: that of 16 partial sums; both go
    along.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _soften(builder, kind, arguments[1:], None)

    return types.float32(kind, *(types.int64,) * 4), generate


@intrinsic
def soften_part(
    typingctx: Any,
    kind: Any,
    scores: Any,
    weights: Any,
    best: Any,
    totals: Any,
    low: Any,
    high: Any,
) -> Any:
    """`soften` where only the places from `low` to `high` are seen; the others weigh 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _soften(builder, kind, arguments[1:5], arguments[5:])

    return types.float32(kind, *(types.int64,) * 6), generate


def _soften(builder: Any, kind: Any, addresses: Any, seen: Any) -> Any:
    scores, weights, best, totals = addresses
    values = _values(builder, scores, seen)
    tops, shrink = _follow(builder, kind, values, best, totals)
    total = None
    size = VECTOR_BYTES // 2 if kind == types.uint16 else VECTOR_BYTES
    for place, (value, is_seen) in enumerate(values):
        weight = exponential_vector(builder, kind, builder.fsub(value, tops))
        if is_seen is not None:
            weight = builder.select(is_seen, weight, _floats(0.0))
        total = weight if total is None else builder.fadd(total, weight)
        address = builder.add(weights, INT64(place * size))
        number = round_vector(builder, weight) if kind == types.uint16 else weight
        builder.store(number, builder.inttoptr(address, number.type.as_pointer()), align=4)
    totals_pointer = builder.inttoptr(totals, FLOATS.as_pointer())
    earlier = builder.load(totals_pointer, align=4)
    builder.store(builder.fadd(earlier, total), totals_pointer, align=4)
    return shrink


def _follow(builder: Any, kind: Any, values: Any, best: Any, totals: Any) -> tuple[Any, Any]:
    """The score that numerators are relative to, in all lanes, and what earlier ones are to be
    multiplied by: 1, unless one of these is so much better that its own would become large."""
    best_pointer = builder.inttoptr(best, FLOAT.as_pointer())
    before = builder.load(best_pointer)
    befores = broadcast(builder, before)
    peaks = values[0][0]
    for value, _ in values[1:]:
        peaks = _larger(builder, peaks, value)
    limits = builder.fadd(befores, _floats(_HEADROOM))
    is_better = builder.bitcast(builder.fcmp_ordered(">", peaks, limits), INT16)
    start = builder.block
    with builder.if_then(builder.icmp_unsigned("!=", is_better, INT16(0)), likely=False):
        top = _horizontal_max(builder, peaks)
        builder.store(top, best_pointer)
        tops = broadcast(builder, top)
        shrinks = exponential_vector(builder, kind, builder.fsub(befores, tops))
        totals_pointer = builder.inttoptr(totals, FLOATS.as_pointer())
        shrunk = builder.fmul(builder.load(totals_pointer, align=4), shrinks)
        builder.store(shrunk, totals_pointer, align=4)
        shrink = builder.extract_element(shrinks, INT32(0))
        update = builder.block
    chosen, factor = builder.phi(FLOATS), builder.phi(FLOAT)
    for phi, kept, new in ((chosen, befores, tops), (factor, FLOAT(1.0), shrink)):
        phi.add_incoming(kept, start)
        phi.add_incoming(new, update)
    return chosen, factor


def _values(builder: Any, scores: Any, seen: Any) -> list[tuple[Any, Any]]:
    """The scores as vectors, and where they are seen; elsewhere they are NOTHING. `seen`: the first
    and the last place, or None: all are."""
    values = []
    if seen is not None:
        first, last = (broadcast(builder, builder.trunc(limit, INT32)) for limit in seen)
    for start in range(0, CHUNK, LANES):
        address = builder.add(scores, INT64(start * 4))
        value = builder.load(builder.inttoptr(address, FLOATS.as_pointer()), align=4)
        is_seen = None
        if seen is not None:
            places = ir.Constant(INTS, list(range(start, start + LANES)))
            is_seen = builder.and_(
                builder.icmp_signed(">=", places, first), builder.icmp_signed("<=", places, last)
            )
            value = builder.select(is_seen, value, _floats(NOTHING))
        values.append((value, is_seen))
    return values


def _horizontal_max(builder: Any, top: Any) -> Any:
    for distance in (8, 4, 2, 1):
        order = ir.Constant(INTS, [(lane + distance) % LANES for lane in range(LANES)])
        top = _larger(builder, top, builder.shuffle_vector(top, top, order))
    return builder.extract_element(top, INT32(0))


def exponential_vector(builder: Any, kind: Any, value: Any) -> Any:
    """e ** value for a vector of values <= 0; exactly 1 for 0."""
    value = builder.fmul(value, _floats(_LOG2_E))
    if are_vectors_wide():
        part = _masked(builder, "reduce", value, INT32(_ABOVE_FLOOR))
        return _masked(builder, "scalef", _power(builder, kind, part), value)
    value = _larger(builder, value, _floats(_LOWEST))
    whole = call(builder, f"llvm.floor.v{LANES}f32", FLOATS, value)
    power = _power(builder, kind, builder.fsub(value, whole))
    exponent = builder.add(builder.fptosi(whole, INTS), constant(127))
    scale = builder.bitcast(builder.shl(exponent, constant(23)), FLOATS)
    return builder.fmul(power, scale)


def _power(builder: Any, kind: Any, part: Any) -> Any:
    """2 ** part for a vector of numbers from 0 to 1."""
    first, *others = _SERIES[kind]
    series = _floats(first)
    for factor in others:
        series = add_product(builder, _floats(factor), series, part)
    return series


def _masked(builder: Any, name: str, left: Any, right: Any) -> Any:
    """An instruction of AVX-512 on all lanes."""
    lanes, rounding = ir.Constant(INT16, _EVERY_LANE), INT32(_AS_USUAL)
    full_name = f"llvm.x86.avx512.mask.{name}.ps.512"
    return call(builder, full_name, FLOATS, left, right, _floats(0.0), lanes, rounding)


def _larger(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _floats(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)
