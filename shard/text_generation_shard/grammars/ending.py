"""How a text that a grammar describes ends soonest, from any state of it.

A state is known by its places in the grammar's expression (`language`), not by the tokens that are
allowed next: those are the same before and behind a part of what ends a text, as in `.*\\.py`. The
text that the places call the shortest is tried in the matcher before it is trusted. Where the
matcher refuses it, as the expression may have more texts than the grammar, texts are searched with
both, the nearest end first; where a grammar could not be read at all, with the matcher alone.
What is found depends on the state alone: all ranks find the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

from llguidance import LLMatcher, LLTokenizer

from text_generation_shard.grammars.blind import allowed_tokens, blind_ending
from text_generation_shard.grammars.language.expressions import Symbol
from text_generation_shard.grammars.language.grammar import grammar_expression
from text_generation_shard.grammars.language.places import Places, after, distance, start

# Shortest texts of as many places are tried before texts are searched.
_MOST_TRIED = 8
# No token has more characters than this on average.
_MOST_CHARACTERS = 16
# Bytes of one character.
_MOST_BYTES = 4
# What closes something before what fills it.
_PRINTABLE = [chr(code) for code in (*b'"]}),;>.', *range(32, 127))]


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a text: of its grammar's expression, and the beginning of a character that is not
    whole yet. Without places nothing is known but what the matcher knows."""

    places: Places
    pending: bytes = b""

    @property
    def distance(self) -> float:
        """Characters that must follow at least, as far as is known."""
        return distance(self.places) if self.places else 0

    def is_too_far(self, limit: int) -> bool:
        """Whether no text of `limit` tokens ends the text."""
        return limit < 0 or self.distance > limit * _MOST_CHARACTERS

    def needs_care(self, limit: int) -> bool:
        """Whether the end may be more than `limit` tokens away, each a byte at least."""
        return self.distance * _MOST_BYTES > limit


@dataclass(slots=True)
class _Node:
    """A text that was come to in a search."""

    matcher: LLMatcher
    position: Position
    tokens: list[int]
    symbols: list[Symbol]


class EndingSearch:
    """The tokens of a vocabulary as text; all grammars of a model share one."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._eos = tokenizer.eos_token
        # What was looked up: it never changes.
        self._symbols: dict[int, Symbol | bytes] = {}
        self._single: dict[str, list[int]] = {}

    def begin(self, text: str) -> Position | None:
        """The start of a grammar's texts; None if it is certain that there is no text."""
        expression = grammar_expression(text, self._special)
        if expression is None:
            return Position(())
        try:
            places = start(expression)
        except RecursionError:
            return Position(())
        return Position(places) if places else None

    def advance(self, position: Position, tokens: Sequence[int]) -> Position:
        """The position behind more tokens."""
        try:
            return self._advanced(position, tokens)
        except RecursionError:
            # The stack is another one than where the grammar was tried.
            return Position(())

    def _advanced(self, position: Position, tokens: Sequence[int]) -> Position:
        places, pending = position.places, position.pending
        for token in tokens:
            if not places:
                break
            symbol = self._symbol(token)
            if isinstance(symbol, int):
                places = after(places, symbol)
                continue
            text = symbol
            if isinstance(symbol, bytes):
                text, pending = _split(pending + symbol)
            elif pending:
                return Position(())
            for character in str(text):
                places = after(places, character)
        return Position(places, pending)

    def find(
        self, matcher: LLMatcher, position: Position, limit: int, num_steps: int
    ) -> list[int] | None:
        """At most `limit` tokens after which the text may end, or None if none are found.

        `num_steps` are tried in a search, at most, where the shortest text is refused.
        """
        if position.is_too_far(limit):
            return None
        if position.places:
            try:
                return self._nearest(matcher, position, limit, num_steps)
            except RecursionError:
                pass  # see `advance`
        return blind_ending(matcher, self._signs(), limit, num_steps)

    def _nearest(
        self, matcher: LLMatcher, position: Position, limit: int, num_steps: int
    ) -> list[int] | None:
        """The same where the places are known."""
        if position.pending:
            return self._completed(matcher, position, limit, num_steps)
        is_right = False
        for place in sorted(position.places, key=lambda place: place.length)[:_MOST_TRIED]:
            if place.length > limit * _MOST_CHARACTERS:
                # It could be of any length.
                break
            tokens = self._written(place.shortest())
            if ends(matcher, tokens, self._eos):
                is_right = True
                if len(tokens) <= limit:
                    return tokens
        if is_right:
            # The matcher means what the places say, and they know nothing shorter.
            return None
        return self._search(matcher, position, limit, num_steps)

    def _completed(
        self, matcher: LLMatcher, position: Position, limit: int, num_steps: int
    ) -> list[int] | None:
        """The same behind the beginning of a character: with what the matcher has for its end."""
        ends_of_it = self._whole(matcher, position)
        for tokens, following, behind in islice(ends_of_it, _MOST_TRIED):
            share = num_steps // _MOST_TRIED
            rest = self.find(behind, following, limit - len(tokens), share)
            if rest is not None:
                return [*tokens, *rest]
        return None

    def _whole(
        self, matcher: LLMatcher, position: Position
    ) -> Iterator[tuple[list[int], Position, LLMatcher]]:
        """Tokens that make the character whole, with where they lead."""
        for token in allowed_tokens(matcher.compute_bitmask()):
            following, behind = self.advance(position, [token]), matcher.deep_copy()
            if not following.places or not behind.consume_token(token):
                continue
            if not following.pending:
                yield [token], following, behind
                continue
            # What ends the character and begins another one could go on so without an end.
            if not following.pending.startswith(position.pending):
                continue
            for tokens, place, state in self._whole(behind, following):
                yield [token, *tokens], place, state

    def _search(
        self, matcher: LLMatcher, position: Position, limit: int, num_steps: int
    ) -> list[int] | None:
        """Letter by letter, the nearest end first: texts of the expression that the matcher has."""
        first = _Node(matcher.deep_copy(), position, [], [])
        heap: list[tuple[float, int, _Node]] = [(position.distance, 0, first)]
        # What the matcher allows tells states apart that are one in the expression.
        seen: set[tuple[Places, bytes]] = set()
        order = 0
        while heap and num_steps > 0:
            _, _, node = heappop(heap)
            if node.matcher.is_accepting():
                tokens = self._written(node.symbols)
                is_right = ends(matcher, tokens, self._eos)
                tokens = tokens if is_right else node.tokens
                if len(tokens) <= limit:
                    return tokens
            state = node.position.places, node.matcher.compute_bitmask()
            if node.matcher.is_error() or state in seen:
                continue
            seen.add(state)
            firsts = [first for place in node.position.places for first in place.firsts()]
            # Among equals the last is looked at first, as it is nearest to its end.
            for symbol in reversed(dict.fromkeys(firsts)):
                num_steps -= 1
                following = self._step(node, symbol)
                if following is not None:
                    order += 1
                    price = len(following.symbols) + following.position.distance
                    heappush(heap, (price, -order, following))
        return None

    def _step(self, node: _Node, symbol: Symbol) -> _Node | None:
        tokens = [symbol] if isinstance(symbol, int) else self._tokens_of(symbol)
        position = Position(after(node.position.places, symbol))
        matcher = node.matcher.deep_copy()
        if not position.places or not tokens or not matcher.consume_tokens(tokens):
            return None
        return _Node(matcher, position, [*node.tokens, *tokens], [*node.symbols, symbol])

    def _signs(self) -> list[int]:
        found = map(self._tokens_of, _PRINTABLE)
        return list(dict.fromkeys(tokens[0] for tokens in found if len(tokens) == 1))

    def _written(self, symbols: Sequence[Symbol]) -> list[int]:
        """The tokens of a text, few of them."""
        tokens: list[int] = []
        text: list[str] = []
        for symbol in (*symbols, -1):
            if isinstance(symbol, str):
                text.append(symbol)
                continue
            if text:
                tokens += self._tokens("".join(text))
                text = []
            if symbol >= 0:
                tokens.append(symbol)
        return tokens

    def _tokens(self, text: str) -> list[int]:
        own = self._tokenizer.tokenize_str(text)
        return min(own, self._tokenizer.greedy_tokenize(text), key=len)

    def _tokens_of(self, sign: str) -> list[int]:
        if sign not in self._single:
            self._single[sign] = self._tokenizer.greedy_tokenize(sign)
        return self._single[sign]

    def _symbol(self, token: int) -> Symbol | bytes:
        """The text of a token, bytes where that is no whole text, or the number of one that is
        none."""
        if token not in self._symbols:
            found: Symbol | bytes = token
            if not self._tokenizer.is_special_token(token):
                found = self._tokenizer.decode_bytes([token])
                if found.isascii():
                    found = found.decode("ascii")
            self._symbols[token] = found
        return self._symbols[token]

    def _special(self, name: str) -> int | None:
        tokens = self._tokenizer.tokenize_str(name, parse_special=True)
        return tokens[0] if len(tokens) == 1 else None


def _split(data: bytes) -> tuple[str, bytes]:
    """Whole characters, and the beginning of one."""
    for length in range(min(4, len(data) + 1)):
        try:
            text = data[: len(data) - length].decode()
        except UnicodeDecodeError:
            continue
        return text, data[len(data) - length :]
    # No text, which no grammar allows.
    return data.decode("utf-8", "replace"), b""


def ends(matcher: LLMatcher, tokens: Sequence[int], eos: int) -> bool:
    """Whether the text may go on with `tokens` and end there."""
    return matcher.validate_tokens([*tokens, eos]) == len(tokens) + 1
