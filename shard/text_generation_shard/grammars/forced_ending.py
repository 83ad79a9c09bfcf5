"""How a text that a grammar describes can end soon: a beam search for few tokens.

The search knows how JSON ends, and manages with others. It finds a short ending, not always the
shortest. What it finds depends on what it is given alone: same state and hint, same ending.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from llguidance import LLMatcher, LLTokenizer

# States that one search looks at, at most: what cannot be found so is given up.
_MAX_STATES = 10_000
# Masks that take as long as one more state.
_MASKS_PER_STATE = 16
# How often a token is written in such a string, to see whether it helps, and how many that help
# are enough.
_LONGEST_RUN = 64
_ENOUGH_RUNS = 3
# A state that allows so few tokens is searched through all of them.
_FEW_TOKENS = 32
# Of the tokens that are no candidates, so many are tried.
_NUM_SAMPLES = 16
# Nodes that are looked at for each one that is followed.
_TRIES = 4
# What closes or leads on, and what fills a text of a fixed length or form: there, the longer a
# token is, the fewer are needed.
_CLOSING = tuple("".join(item) for size in (3, 2, 1) for item in product('"]}', repeat=size))
_LEADING = (",", ":", '":', '":"', '":[', '","', '"],"', '},{"', '},"', "[]", "{}", "[]}", "{}}")
_FILLING = tuple(character * size for character in "0aA" for size in (16, 8, 4, 3, 2, 1))
_SINGLE = tuple(chr(code) for code in range(33, 127))
# Allowed inside a JSON string, never between its parts.
_TEXT_ONLY = tuple("@#$%&;<>?~")

# What opens something must close it; whitespace is never needed where something else can stand.
_PRICES = {"{": 6.0, "[": 6.0} | dict.fromkeys(" \t\r\n", 4.0)
# For what is written where a list, a number or a string could end, or another string begin.
_DETOUR_PRICES = {"]": 8.0, "}": 8.0, ",": 8.0, '"': 1.0}
# For a state that allows what an earlier one did: likely the same word, number or list goes on.
_REPETITION_PRICE = 1.0
# For the later ones of many ways to go on, so that the first ways of all states come first.
_PLACE_PRICE = 1 / 32


# What was written to get somewhere: the last tokens, and what came before them.
_Path = tuple[Sequence[int], "_Path"] | None


@dataclass(frozen=True, slots=True)
class _Node:
    """A place that the search has come to."""

    price: float
    # Tokens written so far.
    length: int
    path: _Path
    # The state before the last of them.
    state: LLMatcher

    def reach(self) -> LLMatcher | None:
        """The state here; None if the grammar does not go here after all."""
        matcher = self.state.deep_copy()
        if self.path is not None and not matcher.consume_tokens(list(self.path[0])):
            return None
        return matcher

    def tokens(self) -> list[int]:
        """All that was written."""
        steps, path = [], self.path
        while path is not None:
            steps.append(path[0])
            path = path[1]
        return [token for step in reversed(steps) for token in step]


class EndingSearch:
    """Which tokens of a vocabulary end things; all grammars of a model share one."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._eos = tokenizer.eos_token
        self._candidates = self._single((*_CLOSING, *_LEADING, *_FILLING, *_SINGLE))
        self._filling = set(self._single(_FILLING))
        self._text_only = self._single(_TEXT_ONLY)
        # What was looked up: it never changes.
        self._texts: dict[int, str] = {}

    def find(
        self,
        matcher: LLMatcher,
        limit: int,
        width: int,
        hint: Sequence[int] = (),
        depth: int | None = None,
    ) -> list[int] | None:
        """At most `limit` tokens after which the text may end, or None if none are found.

        `width` states are followed at once. `hint` is an ending of an earlier state: a text that
        can go on with the last tokens of it counts as ended. `depth` bounds what is put before
        them.
        """
        levels = {0: [_Node(0.0, 0, None, matcher)]}
        known: set[bytes] = set()
        budget = _MAX_STATES
        for length in range(1 + min(limit, limit if depth is None else depth)):
            seen: set[bytes] = set()
            nodes = sorted(levels.pop(length, ()), key=lambda item: item.price)
            for node in nodes[: _TRIES * width]:
                budget -= 1
                state = node.reach()
                if state is None:
                    continue
                if state.is_accepting():
                    return node.tokens()
                mask = state.compute_bitmask()
                # States that allow the same after as many tokens are taken for the same.
                if state.is_error() or mask in seen:
                    continue
                seen.add(mask)
                if (rest := self._rest(state, mask, hint, limit - length)) is not None:
                    return [*node.tokens(), *rest]
                price = node.price + (_REPETITION_PRICE if mask in known else 0.0)
                steps, cost = self._steps(state, mask)
                budget -= cost // _MASKS_PER_STATE
                for extra, tokens in steps:
                    child = _Node(price + extra, length + len(tokens), (tokens, node.path), state)
                    levels.setdefault(child.length, []).append(child)
                if len(seen) == width:
                    break
            known |= seen
            if not levels or budget <= 0:
                return None
        return None

    def _rest(
        self, state: LLMatcher, mask: bytes, hint: Sequence[int], limit: int
    ) -> list[int] | None:
        """The longest end of the hint that ends the text."""
        for start in range(max(0, len(hint) - limit), len(hint)):
            if _is_allowed(mask, hint[start]) and ends(state, hint[start:], self._eos):
                return list(hint[start:])
        return None

    def _steps(
        self, state: LLMatcher, mask: bytes
    ) -> tuple[list[tuple[float, Sequence[int]]], int]:
        """Ways to go on with their prices, and how many masks were computed to find them."""
        if forced := state.compute_ff_tokens():
            return [(0.0, forced)], 0
        if int.from_bytes(mask, "little").bit_count() <= _FEW_TOKENS:
            tokens = _allowed(mask)
        else:
            tokens = [token for token in self._candidates if _is_allowed(mask, token)]
            tokens = tokens or _sample(_allowed(mask))
        if not any(_is_allowed(mask, token) for token in self._text_only):
            return self._structure(tokens), 0
        quotes = [token for token in tokens if self._text(token).startswith('"')]
        if any(_run(state, mask, token, 1) for token in quotes[-1:]):
            return self._text_that_can_end(tokens), 1
        return self._text_that_can_not_end(state, mask, tokens)

    def _structure(self, tokens: list[int]) -> list[tuple[float, Sequence[int]]]:
        """Between the parts of JSON: what closes and leads on before what opens."""
        texts = [self._text(token) for token in tokens]
        beginnings = {text[:1] for text in texts}
        # What can end here; what else is written delays it.
        found = next((sign for sign in '}],"' if sign in beginnings), "")
        direct = "}]" if found and found in "}]" else found
        steps: list[tuple[float, Sequence[int]]] = []
        for place, (token, text) in enumerate(zip(tokens, texts, strict=True)):
            price = place * _PLACE_PRICE + sum(_PRICES.get(character, 0.0) for character in text)
            if found and text[:1] not in direct:
                price += _DETOUR_PRICES[found]
            # Among equals, the one that has closed most.
            price -= sum(character in '"]}' for character in text) / 64
            steps.append((price, [token]))
        return steps

    def _text_that_can_end(self, tokens: list[int]) -> list[tuple[float, Sequence[int]]]:
        steps: list[tuple[float, Sequence[int]]] = []
        for place, token in enumerate(tokens):
            price = 0.0 if self._text(token).startswith('"') else _DETOUR_PRICES["}"]
            steps.append((price + place * _PLACE_PRICE, [token]))
        return steps

    def _text_that_can_not_end(
        self, state: LLMatcher, mask: bytes, tokens: list[int]
    ) -> tuple[list[tuple[float, Sequence[int]]], int]:
        """Tokens as often as it takes until something else is allowed; else what is longest."""
        longest = sorted(tokens, key=lambda token: -len(self._text(token)))
        helpful: list[list[int]] = []
        cost = 0
        for token in longest:
            limit = _LONGEST_RUN if token in self._filling else 1
            cost += limit
            if run := _run(state, mask, token, limit):
                helpful.append(run)
                # The longest tokens come first: what follows takes more of them.
                if len(helpful) == _ENOUGH_RUNS:
                    break
        ways = sorted(helpful, key=len) or [[token] for token in longest]
        return [(place * _PLACE_PRICE, way) for place, way in enumerate(ways)], cost

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode_str([token])
        return self._texts[token]

    def _single(self, texts: Sequence[str]) -> list[int]:
        """The tokens that are exactly one of these texts."""
        found = (self._tokenizer.greedy_tokenize(text) for text in texts)
        return list(dict.fromkeys(tokens[0] for tokens in found if len(tokens) == 1))


def ends(matcher: LLMatcher, tokens: Sequence[int], eos: int) -> bool:
    """Whether the text may go on with `tokens` and end there."""
    return matcher.validate_tokens([*tokens, eos]) == len(tokens) + 1


def _run(state: LLMatcher, mask: bytes, token: int, longest: int) -> list[int]:
    """The token as often as it takes until something else is allowed; empty: that takes long."""
    matcher = state.deep_copy()
    for count in range(1, longest + 1):
        if not matcher.consume_token(token):
            return []
        if matcher.compute_bitmask() != mask:
            return [token] * count
    return []


def _sample(tokens: list[int]) -> list[int]:
    """Some of many tokens, evenly."""
    return tokens[:: max(1, len(tokens) // _NUM_SAMPLES)]


def _is_allowed(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def _allowed(mask: bytes) -> list[int]:
    octets = ((place, octet) for place, octet in enumerate(mask) if octet)
    return [place * 8 + bit for place, octet in octets for bit in range(8) if octet >> bit & 1]
