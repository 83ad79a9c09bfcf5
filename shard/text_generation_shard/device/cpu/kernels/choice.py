"""One token of each row of scores: the best one, or one drawn from those that are likely enough.

What `sampling.sample` does with torch's operators, for one row at a time and without sorting a
vocabulary. Nothing of a row depends on another one.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numba import float32, int64, njit, prange, types

from text_generation_shard.device.cpu.kernels.llvm import (
    Vector,
    address_of,
    array_at,
    call,
    chosen,
    load,
    reinterpreted,
    scratch,
    store,
)
from text_generation_shard.device.cpu.kernels.structs import (
    FlagRows,
    Ints,
    RealRows,
    Reals,
    ShortRows,
    struct_type,
)
from text_generation_shard.device.cpu.kernels.vector import FLOAT32, inlined
from text_generation_shard.device.cpu.kernels.vector_code import (
    fma,
    largest_number,
    nearest,
    polynomial,
    sum_of_lanes,
)

BLOCK: Final = 128
"""Neighbouring scores that are looked at together."""
_BLOCK: Final = Vector(float32, BLOCK)
_INTS: Final = Vector(types.int32, BLOCK)

_LOG2_E: Final = 1.4426950408889634
# ln 2 in two parts, the first with so few bits that its products with small whole numbers are
# exact (Cody & Waite 1980).
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.42860677e-6
# Below it a weight is 0: 2 ** (it / ln 2) is near the smallest normal number.
_FARTHEST: Final = -87.0
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

# How far below the best score tokens are looked at first; almost always that is enough.
_DEPTH: Final = 8.0
# Candidates are counted into so many bins until there are few enough to be sorted.
_BINS: Final = 1024
_FEW: Final = 48
# Of float32, as float64.
_LOWEST: Final = -float(np.finfo(np.float32).max)

_NOTHING: Final = np.float32(-np.inf)


class Choices(NamedTuple):
    """S rows of scores, what is chosen from each by, and what is chosen."""

    # [S, vocab], contiguous. They become what was chosen from: for choices that are drawn relative
    # to the best one, over the temperature, -inf where nothing can be drawn.
    scores: RealRows
    # [S]: see TokenHistory.
    rows: Ints
    lens: Ints
    # See RowTable.
    token_ids: ShortRows
    prompt_lens: Ints
    min_new_tokens: Ints
    # See SamplingTable.
    flags: FlagRows
    values: RealRows
    seeds: Ints
    # [b]: `biases` are added to the scores of choices `biased` and tokens `bias_ids`.
    biased: Ints
    bias_ids: Ints
    biases: Reals
    # Tokens that can not be chosen too early.
    end_ids: Ints
    # [S]: the tokens, and their log-probabilities.
    chosen_ids: Ints
    logprobs: Reals


TAKEN: Final = (struct_type(Choices), int64)
"""What `choose_one` takes."""

# Nothing may raise an exception, see `llvm.call`: what is divided by 0 is infinite.
_QUIET: Final = {"nogil": True, "error_model": "numpy"}
# Of functions that Python never calls: without a way to do that they compile in three quarters of
# the time.
_INNER: Final = {**_QUIET, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def choose(choices: Choices) -> None:
    """Choose a token from each row of scores. A choice from scores of which one is NaN or infinite,
    or none is above -inf, is any token, and its log-probability NaN."""
    assert choices.scores.flags.c_contiguous
    # For one row, waking a thread takes longer than the row.
    if len(choices.scores) == 1:
        choose_one(choices, 0)
    else:
        choose_many(address_of(choose_one, TAKEN), choices)


@njit(parallel=True, nogil=True, cache=True)
def choose_many(code: int, choices: Choices) -> None:
    """`choose` in several threads; code: where `choose_one` lies."""
    for index in prange(len(choices.scores)):
        choices.chosen_ids[index] = -1
        call(code, (choices, np.int64(index)))


@njit(cache=True, **_QUIET)
def choose_one(choices: Choices, index: int) -> None:
    """`choose` from one row of scores."""
    own, row, known = choices.scores[index], choices.rows[index], choices.lens[index]
    values, prompt_len = choices.values[row], choices.prompt_lens[row]
    if choices.flags[row, 3]:
        _penalise(own, choices.token_ids[row, :known], prompt_len, values)
    for bias in range(len(choices.biased)):
        if choices.biased[bias] == index:
            own[choices.bias_ids[bias]] += choices.biases[bias]
    if known - prompt_len < choices.min_new_tokens[row]:
        for token in choices.end_ids:
            own[token] = _NOTHING
    best = best_of(own)
    highest = own[best]
    token, mass = best, 0.0
    if not _NOTHING < highest < np.float32(np.inf):
        # There is nothing to choose from, or nothing to compare with.
        mass = np.nan
    elif choices.flags[row, 0]:
        _scale(own, highest, values[0])
        token, mass = _drawn(own, values, uniform(choices.seeds[row], known))
        highest = np.float32(0.0)
    else:
        mass = _mass(own, highest)
    choices.chosen_ids[index] = token
    choices.logprobs[index] = own[token] - highest - np.log(mass)


@njit(**_INNER)
def _penalise(scores: Any, known: Any, prompt_len: int, values: Any) -> None:
    """Change the scores of the known tokens; only how often they stand in the output counts."""
    repetition, frequency, presence = values[5], values[6], values[7]
    # -1: in the prompt only.
    counts = np.empty(len(scores), np.int32)
    for index in range(len(scores)):
        counts[index] = 0
    for index in range(len(known)):
        if index < prompt_len:
            counts[known[index]] = -1
        else:
            counts[known[index]] = max(counts[known[index]], 0) + 1
    for token in known:
        count = counts[token]
        if count == 0:
            continue
        counts[token] = 0
        score = scores[token]
        score = score / repetition if score > 0 else score * repetition
        if count > 0:
            score -= frequency * np.float32(count) + presence
        scores[token] = score


@njit(**_INNER)
def _drawn(scores: Any, values: Any, number: float) -> Any:
    """A token from scores of at most 0, and what all that can be drawn weigh. Takes from the scores
    what can not be: by min_p, top_k, top_p and typical_p, one after another."""
    num_blocks = -(-len(scores) // BLOCK)
    weights, sums = np.empty(num_blocks * BLOCK, np.float32), np.empty(num_blocks, np.float64)
    _weigh_all(scores, weights, sums)
    top_k, top_p, typical_p, log_min_p = values[1], values[2], values[3], values[4]
    if log_min_p > _NOTHING:
        _cut(scores, weights, sums, scores, log_min_p, len(scores))
    if 0 < top_k < len(scores):
        ones = np.empty(len(scores), np.float32)
        for index in range(len(scores)):
            ones[index] = np.float32(1.0)
        least, _ = reached_at(scores, ones, np.float64(top_k))
        # Ties with the k-th best stay.
        _cut(scores, weights, sums, scores, least, len(scores))
    if top_p < 1.0:
        least, last = reached_at(scores, weights, top_p * _total(sums))
        _cut(scores, weights, sums, scores, least, last)
    if typical_p < 1.0:
        nearness = _nearness(scores, weights, _total(sums))
        least, _ = reached_at(nearness, weights, typical_p * _total(sums))
        _cut(scores, weights, sums, nearness, least, len(scores))
    return draw(weights, sums, number)


@njit(**_INNER)
def best_of(scores: Any) -> Any:
    """The first of the best of a row of scores."""
    spare = scratch(8)
    highest, first = _NOTHING, 0
    for start in range(0, len(scores), BLOCK):
        top = largest_number(load(_BLOCK, _block_at(scores, start, spare)))
        if top > highest:
            highest, first = top, start
    for index in range(first, min(first + BLOCK, len(scores))):
        if scores[index] == highest:
            return index
    return 0


@njit(**_INNER)
def _block_at(scores: Any, start: int, spare: int) -> Any:
    """The address of 128 scores; a copy at `spare`, with -inf behind it, where the row ends."""
    address = np.int64(scores.ctypes.data) + 4 * start
    if start + BLOCK <= len(scores):
        return address
    copy = array_at(FLOAT32, spare)
    for index in range(BLOCK):
        is_there = start + index < len(scores)
        copy[index] = scores[start + index] if is_there else _NOTHING
    return spare


@njit(**_INNER)
def _mass(scores: Any, highest: Any) -> Any:
    """The sum of e ** (score - highest)."""
    spare, weights = scratch(8), scratch(8)
    total = 0.0
    for start in range(0, len(scores), BLOCK):
        total += _weigh(_block_at(scores, start, spare), highest, weights)
    return total


@inlined
def _weigh(scores: int, highest: Any, weights: int) -> Any:
    """e ** (score - highest) of the 128 scores at one address, put to another; returns their sum.
    No score is above `highest`; what is far below it weighs 0, and NaN weighs NaN."""
    value = load(_BLOCK, scores) - highest
    is_far = value < _FARTHEST
    value = chosen(is_far, _FARTHEST, value)
    whole = nearest(value * _LOG2_E)
    part = fma(fma(value, whole, -_LN2_HIGH), whole, -_LN2_LOW)
    rest = fma(part, polynomial(part, _SERIES), part * part)
    # No conversion: what LLVM makes of NaN there is undefined.
    powers = reinterpreted(_INTS, whole + (_WHOLE + 127.0)) << 23
    weight = (rest + 1.0) * reinterpreted(_BLOCK, powers)
    weight = chosen(is_far, 0.0, weight)
    store(weight, weights)
    return sum_of_lanes(weight)


@njit(**_INNER)
def _scale(scores: Any, highest: Any, temperature: Any) -> None:
    """From the best one down, so that the smallest temperatures overflow to -inf, not to NaN."""
    for index in range(len(scores)):
        scores[index] = (scores[index] - highest) / temperature


@njit(**_INNER)
def _weigh_all(scores: Any, weights: Any, sums: Any) -> None:
    """Write e ** score of scores of at most 0, and the sums of blocks of them."""
    spare, address = scratch(8), np.int64(weights.ctypes.data)
    for block in range(len(sums)):
        start = block * BLOCK
        scores_at = _block_at(scores, start, spare)
        sums[block] = _weigh(scores_at, np.float32(0.0), address + 4 * start)


@njit(**_INNER)
def uniform(seed: int, position: int) -> Any:
    """One number in [0, 1) for a (seed, position): splitmix64 (Steele et al. 2014)."""
    state = _mixed(np.uint64(seed)) + np.uint64(position) * np.uint64(0x9E3779B97F4A7C15)
    return np.float64(_mixed(state) >> np.uint64(11)) / 2.0**53


@njit(**_INNER)
def _mixed(bits: Any) -> Any:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@njit(**_QUIET)
def draw(weights: Any, sums: Any, number: float) -> Any:
    """Where a number in [0, 1) falls among weights, whose blocks have these sums; and their
    total."""
    total = _total(sums)
    target = number * total
    block, before = _first_beyond(sums, 0, len(sums), 0.0, target)
    start = block * BLOCK
    index, _ = _first_beyond(weights, start, start + BLOCK, before, target)
    return index, total


@njit(**_INNER)
def _total(sums: Any) -> float:
    total = 0.0
    for block in range(len(sums)):
        total += sums[block]
    return total


@njit(**_INNER)
def _first_beyond(weights: Any, first: int, end: int, before: float, target: float) -> Any:
    """The first index where the sum, `before` in front, exceeds the target, and the sum before it;
    the last index that has a weight, should rounding have put the target behind it."""
    found, start = first, before
    for index in range(first, end):
        if weights[index] > 0:
            found, start = index, before
            before += weights[index]
            if before > target:
                break
    return found, start


@njit(**_INNER)
def _nearness(scores: Any, weights: Any, total: float) -> Any:
    """How near each score is to what is expected of it, at most 0 (Meister et al. 2022)."""
    entropy, shift = 0.0, np.log(total)
    for index in range(len(scores)):
        if weights[index] > 0:
            entropy -= weights[index] / total * (scores[index] - shift)
    nearness = np.empty(len(scores), np.float32)
    for index in range(len(scores)):
        # What can not be drawn is infinitely far.
        nearness[index] = -np.abs(scores[index] - shift + entropy)
    return nearness


@njit(**_INNER)
def _cut(scores: Any, weights: Any, sums: Any, keys: Any, least: Any, last: int) -> None:
    """Drop what has a key below `least`, or just that behind the index `last`."""
    for block in range(len(sums)):
        total = 0.0
        for index in range(block * BLOCK, min((block + 1) * BLOCK, len(scores))):
            if keys[index] < least or (keys[index] == least and index > last):
                scores[index] = _NOTHING
                weights[index] = np.float32(0.0)
            total += weights[index]
        sums[block] = total


@njit(**_INNER)
def reached_at(keys: Any, weights: Any, target: float) -> Any:
    """The key and the index at which weights, from the largest key down and equals in order, add up
    to the target; the last ones above -inf, if they never do. Keys are at most 0."""
    indices = np.empty(len(keys), np.int32)
    count, total = _candidates(keys, weights, -_DEPTH, indices)
    if total < target:
        count, total = _candidates(keys, weights, _LOWEST, indices)
    if count == 0:
        # All are NaN or -inf.
        return _NOTHING, np.int64(len(keys) - 1)
    before = 0.0
    sums = np.empty(_BINS, np.float64)
    while count > _FEW:
        high, low = keys[indices[0]], keys[indices[0]]
        for index in range(count):
            high, low = max(high, keys[indices[index]]), min(low, keys[indices[index]])
        if high == low:
            break
        # The largest and the smallest are never in one bin, so that every turn leaves fewer.
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


@njit(**_INNER)
def _bin(key: float, high: float, scale: float) -> Any:
    return np.int64((np.float64(high) - np.float64(key)) * scale)


@njit(**_INNER)
def _candidates(keys: Any, weights: Any, lowest: float, indices: Any) -> Any:
    """Write the indices of keys of at least `lowest`; how many there are, and what they weigh."""
    count, total = 0, 0.0
    for index in range(len(keys)):
        if keys[index] >= lowest:
            indices[count] = index
            count += 1
            total += weights[index]
    return count, total


@njit(**_INNER)
def _first_reaching(sums: Any, before: float, target: float) -> Any:
    """The first bin with which the sum, `before` in front, reaches the target, and the sum before
    it; the last bin with anything, where rounding or a lack of tokens has none reach it."""
    found, start = 0, before
    for index in range(len(sums)):
        if sums[index] > 0:
            found, start = index, before
            before += sums[index]
            if before >= target:
                break
    return found, start


@njit(**_INNER)
def _sort(keys: Any, indices: Any, count: int) -> None:
    """The first `count` indices by insertion: largest key first, equals in order."""
    for end in range(1, count):
        moving, index = indices[end], end
        while index > 0 and keys[indices[index - 1]] < keys[moving]:
            indices[index] = indices[index - 1]
            index -= 1
        indices[index] = moving
