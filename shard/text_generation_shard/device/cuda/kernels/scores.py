"""Changes of scores before the choice: grammars, penalties, biases. scores [S, vocab] are float32;
`places` are row indices."""

import triton
import triton.language as tl

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
