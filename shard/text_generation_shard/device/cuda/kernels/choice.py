"""Changes the scores [S, vocab] float32 (grammars, penalties, biases; `places` are rows of them),
and chooses one token from each row, greedily or by sampling, without a sort. `sampling.sample` is
the reference in torch.

Sums of weights are float32 within a tile and float64 over tiles, in a fixed order.
"""

import triton
import triton.language as tl
from text_generation_process.sampling import DRAWING

# A search first considers only scores at most this far below the best one; this is almost always
# enough.
_DEPTH: tl.constexpr = tl.constexpr(8.0)
# The bits of the largest finite float32; limits per turn of a search.
_LARGEST: tl.constexpr = tl.constexpr(0x7F7FFFFF)
_LIMITS: tl.constexpr = tl.constexpr(8)
# Places of the numbers of a drawn choice.
_NUM_VALUES: tl.constexpr = tl.constexpr(len(DRAWING))
_TEMPERATURE: tl.constexpr = tl.constexpr(DRAWING.index("temperature"))
_TOP_P: tl.constexpr = tl.constexpr(DRAWING.index("top_p"))
_TYPICAL_P: tl.constexpr = tl.constexpr(DRAWING.index("typical_p"))
_MIN_P: tl.constexpr = tl.constexpr(DRAWING.index("min_p"))
_TOP_K: tl.constexpr = tl.constexpr(DRAWING.index("top_k"))
# Bit of a token of the prompt; the lower bits count the token in the output.
_IN_PROMPT: tl.constexpr = tl.constexpr(1 << 30)


@triton.jit
def keep_allowed(scores_ptr, places_ptr, masks_ptr, num_words, vocab, TILE: tl.constexpr):
    """Program (mask, tile): set scores to -inf where the bit in masks [C, num_words] int32 is 0."""
    mask = tl.program_id(0)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_token = token < vocab
    word = tl.load(masks_ptr + mask * num_words + token // 32, mask=is_token, other=0)
    place = tl.load(places_ptr + mask).to(tl.int64)
    is_out = is_token & ((word >> (token % 32)) & 1 == 0)
    nothing = tl.full([TILE], float("-inf"), tl.float32)
    tl.store(scores_ptr + place * vocab + token, nothing, mask=is_out)


@triton.jit(do_not_specialize=["width"])
def count_tokens(
    counts_ptr, tokens_ptr, lens_ptr, prompt_lens_ptr, width, vocab, TILE: tl.constexpr
):
    """Program (row, tile of its tokens): add the first lens[row] of tokens [m, width] int32 to
    counts [m, vocab] int32, initially 0: count in the output, and bit for the prompt."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_known = at < tl.load(lens_ptr + row)
    is_prompt = at < tl.load(prompt_lens_ptr + row)
    token = tl.load(tokens_ptr + row * width + at, mask=is_known, other=0)
    count = counts_ptr + row * vocab + token
    tl.atomic_or(count, _IN_PROMPT, mask=is_known & is_prompt)
    tl.atomic_add(count, 1, mask=is_known & (at >= tl.load(prompt_lens_ptr + row)))


@triton.jit
def penalise(scores_ptr, places_ptr, counts_ptr, values_ptr, vocab, TILE: tl.constexpr):
    """Program (row, tile): apply penalties by counts (see `count_tokens`) and values [m, 3]
    float32: repetition, frequency and presence penalty."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_token = token < vocab
    count = tl.load(counts_ptr + row * vocab + token, mask=is_token, other=0)
    at = scores_ptr + tl.load(places_ptr + row).to(tl.int64) * vocab + token
    score = tl.load(at, mask=is_token, other=0.0)
    repetition = tl.load(values_ptr + 3 * row)
    frequency, presence = tl.load(values_ptr + 3 * row + 1), tl.load(values_ptr + 3 * row + 2)
    repeated = tl.where(score > 0, score / repetition, score * repetition)
    score = tl.where(count != 0, repeated, score)
    output = (count & (_IN_PROMPT - 1)).to(tl.float32)
    score -= frequency * output + tl.where(output > 0, presence, 0.0)
    tl.store(at, score, mask=is_token)


@triton.jit(do_not_specialize=["num_biases"])
def add_biases(
    scores_ptr, places_ptr, tokens_ptr, values_ptr, num_biases, vocab, TILE: tl.constexpr
):
    """Program (tile of biases): add values [b] float32 to the scores of tokens [b]."""
    bias = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_bias = bias < num_biases
    place = tl.load(places_ptr + bias, mask=is_bias, other=0).to(tl.int64)
    token = tl.load(tokens_ptr + bias, mask=is_bias, other=0)
    value = tl.load(values_ptr + bias, mask=is_bias, other=0.0)
    tl.atomic_add(scores_ptr + place * vocab + token, value, mask=is_bias)


@triton.jit
def forbid(scores_ptr, places_ptr, tokens_ptr, num_tokens, vocab, TILE: tl.constexpr):
    """Program (row): set the scores of tokens [num_tokens] to -inf."""
    place = tl.load(places_ptr + tl.program_id(0)).to(tl.int64)
    nothing = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, num_tokens, TILE):
        at = start + tl.arange(0, TILE)
        token = tl.load(tokens_ptr + at, mask=at < num_tokens, other=0)
        tl.store(scores_ptr + place * vocab + token, nothing, mask=at < num_tokens)


@triton.jit
def summarise(
    scores_ptr,
    best_ptr,
    index_ptr,
    sum_ptr,
    vocab,
    num_parts,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, part of PART scores): best score, its first index, and the sum of e ** (score -
    best). best and sum are float32, index int32; all [S, num_parts]."""
    row, part = tl.program_id(0), tl.program_id(1)
    scores_ptr += row.to(tl.int64) * vocab
    best = tl.full([TILE], float("-inf"), tl.float32)
    index = tl.zeros([TILE], tl.int32) + vocab
    total = tl.zeros([TILE], tl.float32)
    for start in range(part * PART, tl.minimum((part + 1) * PART, vocab), TILE):
        token = start + tl.arange(0, TILE)
        score = tl.load(scores_ptr + token, mask=token < vocab, other=float("-inf"))
        larger = tl.maximum(best, score)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(best - shift) + tl.exp(score - shift)
        index = tl.where(score > best, token, index)
        best = larger
    top = tl.max(best, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    at = row * num_parts + part
    tl.store(best_ptr + at, top)
    tl.store(index_ptr + at, tl.min(tl.where(best == top, index, vocab), 0))
    tl.store(sum_ptr + at, tl.sum(total * tl.exp(best - shift), 0))


@triton.jit(do_not_specialize=["num_rows"])
def take_best(
    best_ptr, index_ptr, sum_ptr, out_ptr, num_rows, vocab, num_parts, PARTS_PAD: tl.constexpr
):
    """Program (row): merge the results of `summarise` into out [3, num_rows] float64: best token,
    its log-probability, its score."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS_PAD)
    at, is_part = row * num_parts + part, part < num_parts
    best = tl.load(best_ptr + at, mask=is_part, other=float("-inf"))
    index = tl.load(index_ptr + at, mask=is_part, other=0)
    total = tl.load(sum_ptr + at, mask=is_part, other=0.0)
    top = tl.max(best, 0)
    # NaN if a score is NaN or the best one is infinite.
    mass = tl.sum(tl.where(total == 0.0, 0.0, total * tl.exp(best - top)), 0)
    token = tl.min(tl.where(best == top, index, vocab), 0)
    tl.store(out_ptr + row, tl.minimum(token, vocab - 1).to(tl.float64))
    tl.store(out_ptr + num_rows + row, (-tl.log(mass) + (top - top)).to(tl.float64))
    tl.store(out_ptr + 2 * num_rows + row, top.to(tl.float64))


@triton.jit(do_not_specialize=["num_rows"])
def draw(
    scores_ptr,
    places_ptr,
    values_ptr,
    seeds_ptr,
    positions_ptr,
    indices_ptr,
    out_ptr,
    num_rows,
    vocab,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
):
    """Program (draw): draw a token of row places[d] by a random number from seeds[d] and the row's
    position [num_rows]. Scores become (score - best) / temperature, -inf for tokens that can not be
    drawn.

    values [d, DRAWING] float32: see SamplingColumns; out: see `take_best`; indices [d, CAPACITY]
    int32 is written. Tiles have TILE scores, in a search FEW.
    """
    drawn = tl.program_id(0)
    place = tl.load(places_ptr + drawn)
    scores_ptr += place.to(tl.int64) * vocab
    indices_ptr += drawn.to(tl.int64) * CAPACITY
    best = tl.load(out_ptr + 2 * num_rows + place).to(tl.float32)
    values_ptr += _NUM_VALUES * drawn
    temperature, top_k = tl.load(values_ptr + _TEMPERATURE), tl.load(values_ptr + _TOP_K)
    top_p, typical_p = tl.load(values_ptr + _TOP_P), tl.load(values_ptr + _TYPICAL_P)
    log_min_p = tl.load(values_ptr + _MIN_P)
    is_cut = (top_k > 0) & (top_k < vocab)
    is_filtered = is_cut | (top_p < 1.0)
    total, near, count = _temper(
        scores_ptr, best, temperature, log_min_p, indices_ptr, vocab, is_filtered, CAPACITY, TILE
    )
    # Other threads read the stored values.
    tl.debug_barrier()
    # Whether to search all scores, or only those near the best one.
    is_whole = (not is_filtered) | (count > CAPACITY)
    is_whole = is_whole | (is_cut & (count < top_k) & (log_min_p < -_DEPTH))
    is_whole = is_whole | ((not is_cut) & (near < top_p * total))
    searched = (scores_ptr, indices_ptr, tl.where(is_whole, vocab, count), is_whole)
    # Kept are scores above `value`, and equal ones up to index `last`; of these, those at most
    # `widest` from `middle`.
    value, last, middle, widest = float("-inf"), vocab, 0.0, float("inf")
    if is_cut:
        target = top_k.to(tl.float64)
        value = -_reached(searched, value, last, 0.0, target, "count", FEW)
        total, _ = _masses(searched, value, last, TILE)
    if top_p < 1.0:
        target = top_p * total
        value = -_reached(searched, value, last, 0.0, target, "mass", FEW)
        last = _last_of_equals(searched, value, vocab, target, TILE)
    if typical_p < 1.0:
        total, weighted = _masses(searched, value, last, TILE)
        middle = (weighted / total).to(tl.float32)
        target = typical_p * total
        widest = _reached(searched, value, last, middle, target, "mass", FEW)
    number = _uniform(tl.load(seeds_ptr + drawn), tl.load(positions_ptr + place))
    token, logprob = _choose(scores_ptr, vocab, value, last, middle, widest, number, TILE)
    tl.store(out_ptr + place, token.to(tl.float64))
    tl.store(out_ptr + num_rows + place, logprob)


@triton.jit
def _temper(
    scores_ptr,
    best,
    temperature,
    log_min_p,
    indices_ptr,
    vocab,
    is_filtered,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Scores become (score - best) / temperature, -inf below `log_min_p`. Returns the mass of all
    scores and of those near the best one. If `is_filtered`, writes the indices of these in order,
    up to CAPACITY, and returns their number."""
    total, near = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    count = tl.full([], 0, tl.int32)
    for start in range(0, vocab, TILE):
        index = start + tl.arange(0, TILE)
        score = tl.load(scores_ptr + index, mask=index < vocab, other=float("-inf"))
        # The best score is subtracted first, so that small temperatures overflow to -inf, not NaN.
        score = (score - best) / temperature
        score = tl.where(score < log_min_p, float("-inf"), score)
        tl.store(scores_ptr + index, score, mask=index < vocab)
        weight = tl.exp(score)
        total += tl.sum(weight, 0)
        if is_filtered:
            is_near = score >= -_DEPTH
            near += tl.sum(tl.where(is_near, weight, 0.0), 0)
            at = count + tl.cumsum(is_near.to(tl.int32), 0) - 1
            tl.store(indices_ptr + at, index, mask=is_near & (at < CAPACITY))
            count += tl.sum(is_near.to(tl.int32), 0)
    return total, near, count


@triton.jit
def _candidates(searched, start, value, last, TILE: tl.constexpr):
    """A tile of the searched scores: indices, scores, and whether each is kept.

    `searched`: pointers to scores and indices, how many are searched, and whether these are all."""
    scores_ptr, indices_ptr, count, is_whole = searched
    at = start + tl.arange(0, TILE)
    is_there = at < count
    found = tl.load(indices_ptr + at, mask=is_there & (not is_whole), other=0)
    index = tl.where(is_whole, at, found)
    score = tl.load(scores_ptr + index, mask=is_there, other=float("-inf"))
    is_kept = is_there & ((score > value) | ((score == value) & (index <= last)))
    return index, score, is_kept


@triton.jit
def _reached(searched, value, last, middle, target, KIND: tl.constexpr, TILE: tl.constexpr):
    """The distance from `middle` within which the weights of kept scores add up to the target; the
    largest float32 if they do not. KIND `count`: all weights are 1; `mass`: e ** score.

    The bits of non-negative floats are ordered like the floats, so each turn finds three bits of
    the result.
    """
    low = tl.full([], 0, tl.int64)
    for turn in range(11):
        shift = 30 - 3 * turn
        limits = low + ((1 + tl.arange(0, _LIMITS)).to(tl.int64) << shift)
        sums = tl.zeros([_LIMITS], tl.float64)
        for start in range(0, searched[2], TILE):
            _, score, is_kept = _candidates(searched, start, value, last, TILE)
            if KIND == "count":
                weight = is_kept.to(tl.float32)
            else:
                weight = tl.where(is_kept, tl.exp(score), 0.0)
            bits = tl.abs(score - middle).to(tl.int32, bitcast=True).to(tl.int64)
            is_in = bits[:, None] < limits[None, :]
            sums += tl.sum(tl.where(is_in, weight[:, None], 0.0), 0)
        low += tl.sum((sums < target).to(tl.int64), 0) << shift
    return tl.minimum(low, _LARGEST).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _masses(searched, value, last, TILE: tl.constexpr):
    """Of the kept scores, the sum of the weights e ** score and the weighted sum of the scores.
    Their ratio is the expected score (Meister et al. 2022)."""
    total, weighted = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for start in range(0, searched[2], TILE):
        _, score, is_kept = _candidates(searched, start, value, last, TILE)
        weight = tl.where(is_kept, tl.exp(score), 0.0)
        total += tl.sum(weight, 0)
        weighted += tl.sum(weight * tl.where(weight > 0.0, score, 0.0), 0)
    return total, weighted


@triton.jit
def _last_of_equals(searched, value, vocab, target, TILE: tl.constexpr):
    """Index of the last score equal to `value` that is needed to reach the target."""
    above = tl.full([], 0.0, tl.float64)
    for start in range(0, searched[2], TILE):
        _, score, is_kept = _candidates(searched, start, value, vocab, TILE)
        above += tl.sum(tl.where(is_kept & (score > value), tl.exp(score), 0.0), 0)
    wanted = tl.maximum(tl.ceil((target - above) / tl.exp(value)), 1.0)
    seen, last = tl.full([], 0, tl.int32), vocab
    for start in range(0, searched[2], TILE):
        index, score, is_kept = _candidates(searched, start, value, vocab, TILE)
        is_equal = (is_kept & (score == value)).to(tl.int32)
        is_last = (is_equal > 0) & (seen + tl.cumsum(is_equal, 0) == wanted)
        last = tl.minimum(last, tl.min(tl.where(is_last, index, vocab), 0))
        seen += tl.sum(is_equal, 0)
    return last


@triton.jit
def _kept(score, index, value, last, middle, widest):
    """Scores; -inf for tokens that can not be drawn."""
    is_kept = (score > value) | ((score == value) & (index <= last))
    is_kept = is_kept & (tl.abs(score - middle) <= widest)
    # NaN stays NaN.
    return tl.where(is_kept | (score != score), score, float("-inf"))


@triton.jit
def _choose(scores_ptr, vocab, value, last, middle, widest, number, TILE: tl.constexpr):
    """Set scores that are not kept to -inf. Returns the first index at which the cumulative mass
    exceeds the fraction `number`, and its log-probability."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, TILE):
        index = start + tl.arange(0, TILE)
        score = tl.load(scores_ptr + index, mask=index < vocab, other=float("-inf"))
        total += tl.sum(tl.exp(_kept(score, index, value, last, middle, widest)), 0)
    target = number * total
    before = tl.full([], 0.0, tl.float64)
    token, final = vocab, tl.full([], 0, tl.int32)
    for start in range(0, vocab, TILE):
        index = start + tl.arange(0, TILE)
        score = tl.load(scores_ptr + index, mask=index < vocab, other=float("-inf"))
        score = _kept(score, index, value, last, middle, widest)
        tl.store(scores_ptr + index, score, mask=index < vocab)
        weight = tl.exp(score)
        after = before + tl.sum(weight, 0)
        final = tl.maximum(final, tl.max(tl.where(weight > 0.0, index, 0), 0))
        if (after > target) & (before <= target):
            reached = before + tl.cumsum(weight.to(tl.float64), 0)
            is_hit = (weight > 0.0) & (reached > target)
            token = tl.min(tl.where(is_hit, index, final), 0)
        before = after
    # If rounding puts the target beyond the total, take the last token with a weight.
    token = tl.minimum(token, final)
    tl.debug_barrier()
    return token, tl.load(scores_ptr + token) - tl.log(total)


@triton.jit
def _uniform(seed, position):
    """A number in [0, 1) from (seed, position): splitmix64 (Steele et al. 2014)."""
    bits = _mixed(seed.to(tl.uint64, bitcast=True))
    bits = _mixed(bits + position.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _mixed(bits):
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)
