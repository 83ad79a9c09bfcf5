"""Online softmax over tiles of keys, for decode and prefill (Milakov and Gimelshein 2018). Scores
are multiplied by log2(e), so that all powers have base 2."""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def scaled(products, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr):
    """Scores from products of queries and keys: scaled, and unless SOFT_CAP is 0 limited to
    SOFT_CAP * tanh(score / SOFT_CAP)."""
    scores = products * SCALE
    if SOFT_CAP > 0:
        scores = SOFT_CAP * (2.0 / (1.0 + tl.exp2(scores * (-2.0 * LOG2_E / SOFT_CAP))) - 1.0)
    return scores * LOG2_E


@triton.jit
def add_tile(scores, values, largest, total, mixed):
    """Add the values [N, D] of a tile with scores [M, N], -inf where a key is masked, to the state
    of each query: largest score [M], sum of weights [M], sum of weighted values [M, D]. Returns the
    new state."""
    larger = tl.maximum(largest, tl.max(scores, 1))
    # All keys so far may be masked.
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    shrunk = tl.exp2(largest - shift)
    weights = tl.exp2(scores - shift[:, None])
    product = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return larger, total * shrunk + tl.sum(weights, 1), mixed * shrunk[:, None] + product
