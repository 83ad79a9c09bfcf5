"""Finds an ending with the matcher alone, for grammars that could not be read.

Different states can allow the same tokens, so no state is skipped: a state whose mask was seen
before is only tried later. This finds the endings of JSON and most grammars; finding none proves
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from llguidance import LLMatcher

# A state that allows at most this many tokens tries all of them.
_FEW_TOKENS = 32
# The price of a token, and of each earlier state with the same mask.
_TOKEN, _REPETITION = 0.125, 1.0


@dataclass(slots=True)
class _Node:
    matcher: LLMatcher
    tokens: list[int]
    # The allowed tokens; empty: not computed.
    mask: bytes = b""


def blind_ending(
    matcher: LLMatcher, signs: Sequence[int], limit: int, num_steps: int
) -> list[int] | None:
    """At most `limit` tokens after which the text may end; None: not found.

    `signs`: tokens to try where many are allowed, closing ones first. `num_steps`: the limit of
    tried tokens.
    """
    heap: list[tuple[float, int, _Node]] = [(0.0, 0, _Node(matcher.deep_copy(), []))]
    num_seen: dict[bytes, int] = {}
    order = 0
    while heap and num_steps > 0:
        price, place, node = heappop(heap)
        if node.matcher.is_accepting():
            return node.tokens
        if not node.mask:
            node.mask = node.matcher.compute_bitmask()
            seen = num_seen.get(node.mask, 0)
            num_seen[node.mask] = seen + 1
            if node.matcher.is_error():
                continue
            if seen:
                heappush(heap, (price + seen * _REPETITION, place, node))
                continue
        for tokens in _steps(node, signs):
            num_steps -= 1
            following = node.matcher.deep_copy()
            written = [*node.tokens, *tokens]
            if len(written) <= limit and following.consume_tokens(tokens):
                order += 1
                heappush(heap, (price + _TOKEN, order, _Node(following, written)))
    return None


def _steps(node: _Node, signs: Sequence[int]) -> list[list[int]]:
    if forced := node.matcher.compute_ff_tokens():
        return [forced]
    allowed = allowed_tokens(node.mask)
    if len(allowed) > _FEW_TOKENS:
        some = [token for token in signs if node.mask[token >> 3] >> (token & 7) & 1]
        allowed = some or allowed[:: len(allowed) // _FEW_TOKENS]
    return [[token] for token in allowed]


def allowed_tokens(mask: bytes) -> list[int]:
    """The tokens of a mask."""
    octets = ((place, octet) for place, octet in enumerate(mask) if octet)
    return [place * 8 + bit for place, octet in octets for bit in range(8) if octet >> bit & 1]
