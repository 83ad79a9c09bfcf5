"""One step of a softmax that goes along with its scores.

Online normaliser calculation (Milakov & Gimelshein 2018): per row a score near the best so far, and
the sum of the numerators relative to it.
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
"""Scores of one step."""
NOTHING: Final = -1e30
"""Lower than any score, and finite, so that differences are numbers."""

# Numerators up to e ** 8 are as exact as those up to 1, and so the reference seldom has to move
# (as in FlashAttention 4), for which the maximum within a vector must be found.
_HEADROOM: Final = np.float32(8.0)
_LANE_NUMBERS: Final[Any] = Table(INTS, range(LANES))


@inlined
def softmax_step(
    kind: Any, scores: int, weights: int, best: int, totals: int, low: int, high: int
) -> Any:
    """Numerators of 64 scores of one row; returns what all earlier ones are to be multiplied by.

    scores and weights: addresses of 64 float32 and of 64 numbers of the kind. best: the address of
    the score that the row's numerators are relative to, totals: that of 16 partial sums; both go
    along. Only the scores from `low` to `high` are seen; the others weigh 0.
    """
    if low <= 0 and high >= CHUNK - 1:
        return _step(kind, scores, weights, best, totals, np.int64(0), np.int64(CHUNK - 1))
    return _step(kind, scores, weights, best, totals, low, high)


@inlined
def _step(kind: Any, scores: int, weights: int, best: int, totals: int, low: int, high: int) -> Any:
    # What is not a literal has each function compiled once.
    step = LANES * itemsize(kind)
    first = _seen(scores, low, high)
    second = _seen(scores + VECTOR_BYTES, low - LANES, high - LANES)
    third = _seen(scores + 2 * VECTOR_BYTES, low - 2 * LANES, high - 2 * LANES)
    fourth = _seen(scores + 3 * VECTOR_BYTES, low - 3 * LANES, high - 3 * LANES)
    peaks = _larger(_larger(_larger(first, second), third), fourth)
    top, shrink = array_at(FLOAT32, best)[0], np.float32(1.0)
    if is_any(peaks > top + _HEADROOM):
        # One of these is so much better than earlier ones that its numerator would become large.
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
    """Of 16 scores, the mask of those from `low` to `high`."""
    lanes = _LANE_NUMBERS
    return (lanes >= low) & (lanes <= high)


@inlined
def _seen(scores: int, low: int, high: int) -> Any:
    """16 scores; NOTHING where they are not seen."""
    return chosen(_are_seen(low, high), load(FLOATS, scores), NOTHING)


@inlined
def _weigh(kind: Any, value: Any, low: int, high: int, top: Any, weights: int) -> Any:
    """The numerators of 16 scores, which are put among the weights."""
    weight = chosen(_are_seen(low, high), exponential(kind, value - top), 0.0)
    store_numbers(kind, weight, weights, LANES)
    return weight


@inlined
def _larger(left: Any, right: Any) -> Any:
    return chosen(left > right, left, right)
