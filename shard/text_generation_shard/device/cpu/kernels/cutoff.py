"""Finds where cumulative weights reach a target, from the largest key down, without a full sort."""

from typing import Any, Final

import numpy as np
from numba import njit

from text_generation_shard.device.cpu.kernels.vector import INTERNAL

# A search first considers only keys of at least -_DEPTH; this is almost always enough.
_DEPTH: Final = 8.0
# Candidates are narrowed down by this number of bins until few enough are left to sort.
_BINS: Final = 1024
_FEW: Final = 48
# The lowest float32, as float64.
_LOWEST: Final = -float(np.finfo(np.float32).max)

_NOTHING: Final = np.float32(-np.inf)


@njit(**INTERNAL)
def reached_at(keys: Any, weights: Any, target: float) -> Any:
    """The key and index at which the weights, from the largest key down and equals in order, add up
    to the target; if they never do, the last ones above -inf. Keys are at most 0."""
    indices = np.empty(len(keys), np.int32)
    count, total = _candidates(keys, weights, -_DEPTH, indices)
    if total < target:
        count, total = _candidates(keys, weights, _LOWEST, indices)
    if count == 0:
        # All keys are NaN or -inf.
        return _NOTHING, np.int64(len(keys) - 1)
    before = 0.0
    sums = np.empty(_BINS, np.float64)
    while count > _FEW:
        high, low = keys[indices[0]], keys[indices[0]]
        for index in range(count):
            high, low = max(high, keys[indices[index]]), min(low, keys[indices[index]])
        if high == low:
            break
        # The largest and the smallest key are never in one bin, so every turn leaves fewer
        # candidates.
        scale = (_BINS - 1) / (np.float64(high) - np.float64(low))
        for index in range(_BINS):
            sums[index] = 0.0
        for index in range(count):
            sums[_bin(keys[indices[index]], high, scale)] += weights[indices[index]]
        limit, before = _first_reaching(sums, before, target)
        kept = 0
        for index in range(count):
            if _bin(keys[indices[index]], high, scale) == limit:
                indices[kept] = indices[index]
                kept += 1
        count = kept
    _sort(keys, indices, count)
    index = 0
    while index < count - 1 and before + weights[indices[index]] < target:
        before += weights[indices[index]]
        index += 1
    return keys[indices[index]], np.int64(indices[index])


@njit(**INTERNAL)
def _bin(key: float, high: float, scale: float) -> Any:
    return np.int64((np.float64(high) - np.float64(key)) * scale)


@njit(**INTERNAL)
def _candidates(keys: Any, weights: Any, lowest: float, indices: Any) -> Any:
    """Write the indices of keys of at least `lowest`; returns their number and total weight."""
    count, total = 0, 0.0
    for index in range(len(keys)):
        if keys[index] >= lowest:
            indices[count] = index
            count += 1
            total += weights[index]
    return count, total


@njit(**INTERNAL)
def _first_reaching(sums: Any, before: float, target: float) -> Any:
    """The first bin at which the running sum, starting from `before`, reaches the target, and the
    sum before that bin. If no bin reaches it, the last non-empty bin."""
    found, start = 0, before
    for index in range(len(sums)):
        if sums[index] > 0:
            found, start = index, before
            before += sums[index]
            if before >= target:
                break
    return found, start


@njit(**INTERNAL)
def _sort(keys: Any, indices: Any, count: int) -> None:
    """Sort the first `count` indices by insertion: largest key first, equals in order."""
    for end in range(1, count):
        moving, index = indices[end], end
        while index > 0 and keys[indices[index - 1]] < keys[moving]:
            indices[index] = indices[index - 1]
            index -= 1
        indices[index] = moving
