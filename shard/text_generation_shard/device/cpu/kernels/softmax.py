"""One step of an online softmax (Milakov & Gimelshein 2018).

The state of a row is a reference score near the maximum so far, and the sum of numerators relative
to it.
"""

from typing import Any, Final

import numpy as np

from text_generation_shard.device.cpu.kernels.llvm import (
    FLOATS,
    INTS,
    LANES,
    VECTOR_BYTES,
    Table,
    array_at,
    chosen,
    filled,
    itemsize,
    load,
    store,
)
from text_generation_shard.device.cpu.kernels.vector import (
    FLOAT32,
    exponential,
    inlined,
    store_numbers,
)
from text_generation_shard.device.cpu.kernels.vector_code import (
    first_lane,
    is_any,
    largest_of_lanes,
)

CHUNK: Final = 64
"""Scores per step."""
NOTHING: Final = -1e30
"""Lower than any score, and finite, so that differences are numbers."""

# Numerators up to e ** 8 are as exact as those up to 1, so the reference rarely moves (as in
# FlashAttention 4); moving it requires the maximum within a vector.
_HEADROOM: Final = np.float32(8.0)
_LANE_NUMBERS: Final[Any] = Table(INTS, range(LANES))


@inlined
def softmax_step(
    kind: Any, scores: int, weights: int, best: int, totals: int, low: int, high: int
) -> Any:
    """Compute the numerators of 64 scores of a row; returns the factor for all earlier numerators.

    scores and weights: addresses of 64 float32 and of 64 numbers of the kind. best: address of the
    row's reference score; totals: address of 16 partial sums; both are updated. Scores outside
    `low` to `high` are masked and weigh 0.
    """
    if low <= 0 and high >= CHUNK - 1:
        return _step(kind, scores, weights, best, totals, np.int64(0), np.int64(CHUNK - 1))
    return _step(kind, scores, weights, best, totals, low, high)


@inlined
def _step(kind: Any, scores: int, weights: int, best: int, totals: int, low: int, high: int) -> Any:
    # No literals as arguments, so that each function is compiled once.
    step = LANES * itemsize(kind)
    first = _seen(scores, low, high)
    second = _seen(scores + VECTOR_BYTES, low - LANES, high - LANES)
    third = _seen(scores + 2 * VECTOR_BYTES, low - 2 * LANES, high - 2 * LANES)
    fourth = _seen(scores + 3 * VECTOR_BYTES, low - 3 * LANES, high - 3 * LANES)
    peaks = _larger(_larger(_larger(first, second), third), fourth)
    top, shrink = array_at(FLOAT32, best)[0], np.float32(1.0)
    if is_any(peaks > top + _HEADROOM):
        # A numerator would become too large: move the reference.
        before, top = filled(FLOATS, top), largest_of_lanes(peaks)
        array_at(FLOAT32, best)[0] = top
        shrinks = exponential(kind, before - top)
        store(load(FLOATS, totals) * shrinks, totals)
        shrink = first_lane(shrinks)
    total = _weigh(kind, first, low, high, top, weights)
    at = weights + step
    total = total + _weigh(kind, second, low - LANES, high - LANES, top, at)
    at += step
    total = total + _weigh(kind, third, low - 2 * LANES, high - 2 * LANES, top, at)
    at += step
    total = total + _weigh(kind, fourth, low - 3 * LANES, high - 3 * LANES, top, at)
    store(load(FLOATS, totals) + total, totals)
    return shrink


@inlined
def _are_seen(low: int, high: int) -> Any:
    """A mask of lanes from `low` to `high`."""
    lanes = _LANE_NUMBERS
    return (lanes >= low) & (lanes <= high)


@inlined
def _seen(scores: int, low: int, high: int) -> Any:
    """Load 16 scores; NOTHING where masked."""
    return chosen(_are_seen(low, high), load(FLOATS, scores), NOTHING)


@inlined
def _weigh(kind: Any, value: Any, low: int, high: int, top: Any, weights: int) -> Any:
    """Compute the numerators of 16 scores, and store them as weights."""
    weight = chosen(_are_seen(low, high), exponential(kind, value - top), 0.0)
    store_numbers(kind, weight, weights, LANES)
    return weight


@inlined
def _larger(left: Any, right: Any) -> Any:
    return chosen(left > right, left, right)
