"""Chooses one token from each row of scores, greedily or by sampling.

Like `sampling.sample` in torch, but row by row and without sorting the vocabulary. Rows are
independent of each other.
"""

from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numba import float32, from_dtype, int64, njit, types

from text_generation_shard.device.cpu.kernels import (
    Ints,
    RealRows,
    Reals,
    ShortRows,
    llvm,
    struct_type,
    vector,
)
from text_generation_shard.device.cpu.kernels.thread_pool import compute_all
from text_generation_shard.device.cpu.kernels.vector import FLOAT32, INTERNAL, inlined
from text_generation_shard.sampling import SAMPLING_ROW

BLOCK: Final = 128
"""Neighbouring scores that are processed together."""
_BLOCK: Final = llvm.Vector(float32, BLOCK)
_INTS: Final = llvm.Vector(types.int32, BLOCK)

_LOG2_E: Final = 1.4426950408889634
# ln 2 in two parts, the first with few bits, so that its products with small integers are exact
# (Cody & Waite 1980).
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.42860677e-6
# Weights of lower scores are 0; e ** _FARTHEST is near the smallest normal number.
_FARTHEST: Final = -87.0
# The lowest bits of the sum of this and a small integer are the integer.
_WHOLE: Final = 1.5 * 2.0**23
# The series of e ** f for f in [-ln 2 / 2, ln 2 / 2] after 1 + f, highest power first (Cephes).
_SERIES: Final = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)

# A search first considers only keys of at least -_DEPTH; this is almost always enough.
_DEPTH: Final = 8.0
# Candidates are narrowed down by this number of bins until few enough are left to sort.
_BINS: Final = 1024
_FEW: Final = 48
# The lowest float32, as float64.
_LOWEST: Final = -float(np.finfo(np.float32).max)

_NOTHING: Final = np.float32(-np.inf)


SamplingRows = Annotated[Any, from_dtype(SAMPLING_ROW)[::1]]


class Choices(NamedTuple):
    """S rows of scores, the sampling parameters, and the chosen tokens."""

    # [S, vocab], contiguous. Overwritten by the scores that tokens are chosen from; in sampled rows
    # relative to the best score, divided by the temperature, -inf for tokens that can not be drawn.
    scores: RealRows
    # [S]: see TokenHistory.
    rows: Ints
    lens: Ints
    # See RowTable.
    token_ids: ShortRows
    prompt_lens: Ints
    min_new_tokens: Ints
    # See SamplingTable.
    sampling: SamplingRows
    # [b]: `biases` are added to the scores of tokens `bias_ids` in rows `biased`.
    biased: Ints
    bias_ids: Ints
    biases: Reals
    # Tokens that are forbidden before `min_new_tokens`.
    end_ids: Ints
    # See `Allowed.masks`; and [S]: the index of a row's mask, or -1.
    masks: ShortRows
    mask_of: Ints
    # [S]: chosen tokens and their log-probabilities.
    chosen_ids: Ints
    logprobs: Reals


TAKEN: Final = (struct_type(Choices), int64)
"""Signature of `choose_one`."""

# Compiled without exceptions, see `llvm.call`: a division by 0 is infinite.
_QUIET: Final = {"nogil": True, "error_model": "numpy"}


def choose(choices: Choices) -> None:
    """Choose a token from each row of scores. If a score is NaN or infinite, or no score is above
    -inf, the token is arbitrary and its log-probability is NaN."""
    assert choices.scores.flags.c_contiguous
    choices.chosen_ids[:] = -1
    # Waking a thread takes longer than one row.
    is_shared = len(choices.scores) > 1
    compute_all(llvm.address_of(choose_one, TAKEN), choices, len(choices.scores), is_shared)


@njit(cache=True, **_QUIET)
def choose_one(choices: Choices, index: int) -> None:
    """`choose` for one row of scores."""
    own, row, known = choices.scores[index], choices.rows[index], choices.lens[index]
    params, prompt_len = choices.sampling[row], choices.prompt_lens[row]
    if choices.mask_of[index] >= 0:
        _keep_allowed(own, choices.masks[choices.mask_of[index]])
    if params.is_penalising:
        _penalise(own, choices.token_ids[row, :known], prompt_len, params)
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
        # No token has a finite score, or a score is invalid.
        mass = np.nan
    elif params.is_sampling:
        _scale(own, highest, params.temperature)
        token, mass = _drawn(own, params, uniform(params.seed, known))
        highest = np.float32(0.0)
    else:
        mass = _mass(own, highest)
    choices.chosen_ids[index] = token
    choices.logprobs[index] = own[token] - highest - np.log(mass)


@njit(**INTERNAL)
def _keep_allowed(scores: Any, mask: Any) -> None:
    """Set the scores of tokens whose bit is not set to -inf."""
    for word in range(len(mask)):
        bits = mask[word]
        if bits != -1:
            first = word * 32
            for bit in range(min(32, len(scores) - first)):
                if not bits >> bit & 1:
                    scores[first + bit] = _NOTHING


@njit(**INTERNAL)
def _penalise(scores: Any, known: Any, prompt_len: int, params: Any) -> None:
    """Apply penalties to the scores of known tokens; frequency and presence count only the
    output."""
    repetition = params.repetition_penalty
    frequency, presence = params.frequency_penalty, params.presence_penalty
    # -1: only in the prompt.
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


@njit(**INTERNAL)
def _drawn(scores: Any, params: Any, number: float) -> Any:
    """Draw a token from scores of at most 0; returns it and the total weight of all candidates.
    Filters by min_p, top_k, top_p and typical_p, in this order; filtered scores become -inf."""
    num_blocks = -(-len(scores) // BLOCK)
    weights, sums = np.empty(num_blocks * BLOCK, np.float32), np.empty(num_blocks, np.float64)
    _weigh_all(scores, weights, sums)
    top_k, top_p, typical_p = params.top_k, params.top_p, params.typical_p
    if params.min_p > _NOTHING:
        _cut(scores, weights, sums, scores, params.min_p, len(scores))
    if 0 < top_k < len(scores):
        ones = np.empty(len(scores), np.float32)
        for index in range(len(scores)):
            ones[index] = np.float32(1.0)
        least, _ = _reached_at(scores, ones, np.float64(top_k))
        # Ties with the k-th best are kept.
        _cut(scores, weights, sums, scores, least, len(scores))
    if top_p < 1.0:
        least, last = _reached_at(scores, weights, top_p * _total(sums))
        _cut(scores, weights, sums, scores, least, last)
    if typical_p < 1.0:
        nearness = _nearness(scores, weights, _total(sums))
        least, _ = _reached_at(nearness, weights, typical_p * _total(sums))
        _cut(scores, weights, sums, nearness, least, len(scores))
    return draw(weights, sums, number)


@njit(**INTERNAL)
def best_of(scores: Any) -> Any:
    """Index of the best score of a row; the first one of equals."""
    spare = llvm.scratch(8)
    highest, first = _NOTHING, 0
    for start in range(0, len(scores), BLOCK):
        top = vector.largest_number(llvm.load(_BLOCK, _block_at(scores, start, spare)))
        if top > highest:
            highest, first = top, start
    for index in range(first, min(first + BLOCK, len(scores))):
        if scores[index] == highest:
            return index
    return 0


@njit(**INTERNAL)
def _block_at(scores: Any, start: int, spare: int) -> Any:
    """Address of 128 scores; at the end of the row, of a copy at `spare`, padded with -inf."""
    address = np.int64(scores.ctypes.data) + 4 * start
    if start + BLOCK <= len(scores):
        return address
    copy = llvm.array_at(FLOAT32, spare)
    for index in range(BLOCK):
        is_there = start + index < len(scores)
        copy[index] = scores[start + index] if is_there else _NOTHING
    return spare


@njit(**INTERNAL)
def _mass(scores: Any, highest: Any) -> Any:
    """The sum of e ** (score - highest)."""
    spare, weights = llvm.scratch(8), llvm.scratch(8)
    total = 0.0
    for start in range(0, len(scores), BLOCK):
        total += _weigh(_block_at(scores, start, spare), highest, weights)
    return total


@inlined
def _weigh(scores: int, highest: Any, weights: int) -> Any:
    """Store e ** (score - highest) of 128 scores at `weights`; returns their sum. No score is above
    `highest`; scores far below weigh 0, and NaN weighs NaN."""
    value = llvm.load(_BLOCK, scores) - highest
    is_far = value < _FARTHEST
    value = llvm.chosen(is_far, _FARTHEST, value)
    whole = vector.nearest(value * _LOG2_E)
    part = vector.fma(vector.fma(value, whole, -_LN2_HIGH), whole, -_LN2_LOW)
    rest = vector.fma(part, vector.polynomial(part, _SERIES), part * part)
    # No conversion to integer, whose result for NaN is undefined in LLVM.
    powers = llvm.reinterpreted(_INTS, whole + (_WHOLE + 127.0)) << 23
    weight = (rest + 1.0) * llvm.reinterpreted(_BLOCK, powers)
    weight = llvm.chosen(is_far, 0.0, weight)
    llvm.store(weight, weights)
    return vector.sum_of_lanes(weight)


@njit(**INTERNAL)
def _scale(scores: Any, highest: Any, temperature: Any) -> None:
    """The best score is subtracted first, so that small temperatures overflow to -inf, not NaN."""
    for index in range(len(scores)):
        scores[index] = (scores[index] - highest) / temperature


@njit(**INTERNAL)
def _weigh_all(scores: Any, weights: Any, sums: Any) -> None:
    """Write e ** score for scores of at most 0, and the sums of blocks."""
    spare, address = llvm.scratch(8), np.int64(weights.ctypes.data)
    for block in range(len(sums)):
        start = block * BLOCK
        scores_at = _block_at(scores, start, spare)
        sums[block] = _weigh(scores_at, np.float32(0.0), address + 4 * start)


@njit(**INTERNAL)
def uniform(seed: int, position: int) -> Any:
    """A number in [0, 1) from (seed, position): splitmix64 (Steele et al. 2014)."""
    state = _mixed(np.uint64(seed)) + np.uint64(position) * np.uint64(0x9E3779B97F4A7C15)
    return np.float64(_mixed(state) >> np.uint64(11)) / 2.0**53


@njit(**INTERNAL)
def _mixed(bits: Any) -> Any:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@njit(**_QUIET)
def draw(weights: Any, sums: Any, number: float) -> Any:
    """The index at which a number in [0, 1) falls among weights with these block sums; and the
    total weight."""
    total = _total(sums)
    target = number * total
    block, before = _first_beyond(sums, 0, len(sums), 0.0, target, False)
    start = block * BLOCK
    index, _ = _first_beyond(weights, start, start + BLOCK, before, target, False)
    return index, total


@njit(**INTERNAL)
def _total(sums: Any) -> float:
    total = 0.0
    for block in range(len(sums)):
        total += sums[block]
    return total


@njit(**INTERNAL)
def _first_beyond(
    weights: Any, first: int, end: int, before: float, target: float, may_equal: bool
) -> Any:
    """The first index at which the running sum, starting from `before`, exceeds the target (or
    equals it, if it may), and the sum before that index. If rounding puts the target beyond the
    total, the last index with a weight."""
    found, start = first, before
    for index in range(first, end):
        if weights[index] > 0:
            found, start = index, before
            before += weights[index]
            if before > target or (may_equal and before == target):
                break
    return found, start


@njit(**INTERNAL)
def _nearness(scores: Any, weights: Any, total: float) -> Any:
    """Negative distance of each score from the expected score (Meister et al. 2022)."""
    entropy, shift = 0.0, np.log(total)
    for index in range(len(scores)):
        if weights[index] > 0:
            entropy -= weights[index] / total * (scores[index] - shift)
    nearness = np.empty(len(scores), np.float32)
    for index in range(len(scores)):
        # Tokens that can not be drawn have -inf.
        nearness[index] = -np.abs(scores[index] - shift + entropy)
    return nearness


@njit(**INTERNAL)
def _cut(scores: Any, weights: Any, sums: Any, keys: Any, least: Any, last: int) -> None:
    """Drop tokens with a key below `least`, or equal to it after index `last`."""
    for block in range(len(sums)):
        total = 0.0
        for index in range(block * BLOCK, min((block + 1) * BLOCK, len(scores))):
            if keys[index] < least or (keys[index] == least and index > last):
                scores[index] = _NOTHING
                weights[index] = np.float32(0.0)
            total += weights[index]
        sums[block] = total


@njit(**INTERNAL)
def _reached_at(keys: Any, weights: Any, target: float) -> Any:
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
        limit, before = _first_beyond(sums, 0, len(sums), before, target, True)
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
def _sort(keys: Any, indices: Any, count: int) -> None:
    """Sort the first `count` indices by insertion: largest key first, equals in order."""
    for end in range(1, count):
        moving, index = indices[end], end
        while index > 0 and keys[indices[index - 1]] < keys[moving]:
            indices[index] = indices[index - 1]
            index -= 1
        indices[index] = moving
