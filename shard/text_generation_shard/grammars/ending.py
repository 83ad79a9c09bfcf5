"""Finds the shortest ending of a text from any state of its grammar.

A state is identified by its places in the grammar's expression (`language`), not by the tokens
allowed next, which can be equal in different states, as in `.*\\.py`. The shortest text of the
places is checked by the matcher. If the matcher refuses it, as the expression may have more texts
than the grammar, texts are searched with both, nearest end first. If the grammar could not be read,
the matcher is used alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

from llguidance import LLMatcher, LLTokenizer

from text_generation_shard.grammars.blind import allowed_tokens, blind_ending
from text_generation_shard.grammars.language.expressions import Symbol
from text_generation_shard.grammars.language.grammar import grammar_expression
from text_generation_shard.grammars.language.places import (
    Places,
    after,
    after_text,
    distance,
    start,
)

# Places whose shortest texts are tried before a search.
_MOST_TRIED = 8
# No token has more characters than this on average.
_MOST_CHARACTERS = 16
# Bytes of one character.
_MOST_BYTES = 4
# Closing characters come before all others.
_PRINTABLE = [chr(code) for code in (*b'"]}),;>.', *range(32, 127))]


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a text: places in the grammar's expression, and the bytes of an incomplete
    character. Without places only the matcher knows the state."""

    places: Places
    pending: bytes = b""

    @property
    def distance(self) -> float:
        """A lower bound of the characters that must follow."""
        return distance(self.places) if self.places else 0

    def is_too_far(self, limit: int) -> bool:
        """Whether `limit` tokens can not end the text."""
        return limit < 0 or self.distance > limit * _MOST_CHARACTERS

    def needs_care(self, limit: int) -> bool:
        """Whether the end may be more than `limit` tokens away, if each is one byte."""
        return self.distance * _MOST_BYTES > limit

    def growth(self, before: "Position") -> float:
        """Most additional tokens to the end compared with `before`, if each is one byte."""
        rest = _MOST_BYTES - 1 if self.pending else 0
        return max(0, self.distance - before.distance) * _MOST_BYTES + rest


@dataclass(slots=True)
class _Node:
    """A text that a search has reached."""

    matcher: LLMatcher
    position: Position
    tokens: list[int]
    symbols: list[Symbol]


class EndingSearch:
    """Searches endings with a tokenizer; shared by all grammars of a model."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._eos = tokenizer.eos_token
        # Caches of the tokenizer, which never changes.
        self._symbols: dict[int, Symbol | bytes] = {}
        self._single: dict[str, list[int]] = {}

    def begin(self, text: str) -> Position | None:
        """The start of a grammar's texts; None if it certainly has no text."""
        expression = grammar_expression(text, self._special)
        if expression is None:
            return Position(())
        try:
            places = start(expression)
        except RecursionError:
            return Position(())
        return Position(places) if places else None

    def advance(self, position: Position, tokens: Sequence[int]) -> Position:
        """The position after more tokens."""
        try:
            return self._advanced(position, tokens)
        except RecursionError:
            # The stack can be smaller than in the trial.
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
            places = after_text(places, str(text))
        return Position(places, pending)

    def find(
        self, matcher: LLMatcher, position: Position, limit: int, num_steps: int
    ) -> list[int] | None:
        """At most `limit` tokens after which the text may end; None: not found.

        `num_steps`: the limit of the search if the shortest text is refused.
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
        """`find`, with places."""
        if position.pending:
            return self._completed(matcher, position, limit, num_steps)
        is_right = False
        for place in sorted(position.places, key=lambda place: place.length)[:_MOST_TRIED]:
            if place.length > limit * _MOST_CHARACTERS:
                break
            tokens = self._written(place.shortest())
            if ends(matcher, tokens, self._eos):
                is_right = True
                if len(tokens) <= limit:
                    return tokens
        if is_right:
            # The matcher agrees with the places, and they have no shorter text.
            return None
        return self._search(matcher, position, limit, num_steps)

    def _completed(
        self, matcher: LLMatcher, position: Position, limit: int, num_steps: int
    ) -> list[int] | None:
        """`find`, after an incomplete character, which the matcher completes."""
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
        """Tokens that complete the character, and the states after them."""
        for token in allowed_tokens(matcher.compute_bitmask()):
            following, behind = self.advance(position, [token]), matcher.deep_copy()
            if not following.places or not behind.consume_token(token):
                continue
            if not following.pending:
                yield [token], following, behind
                continue
            # A token that also begins another character could repeat without end.
            if not following.pending.startswith(position.pending):
                continue
            for tokens, place, state in self._whole(behind, following):
                yield [token, *tokens], place, state

    def _search(
        self, matcher: LLMatcher, position: Position, limit: int, num_steps: int
    ) -> list[int] | None:
        """A best-first search, by characters, of texts that expression and matcher share."""
        first = _Node(matcher.deep_copy(), position, [], [])
        heap: list[tuple[float, int, _Node]] = [(position.distance, 0, first)]
        # The mask distinguishes states that are equal in the expression.
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
            # Of equal prices the newest is tried first: it is nearest to its end.
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
        """A short tokenization of a text."""
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
        """The text of a token as str or, unless it is ASCII, as bytes; a special token's id."""
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
    """The complete characters, and the bytes of an incomplete one."""
    for length in range(min(4, len(data) + 1)):
        try:
            text = data[: len(data) - length].decode()
        except UnicodeDecodeError:
            continue
        return text, data[len(data) - length :]
    # Invalid UTF-8, which no grammar allows.
    return data.decode("utf-8", "replace"), b""


def ends(matcher: LLMatcher, tokens: Sequence[int], eos: int) -> bool:
    """Whether `tokens` may follow and the text may end after them."""
    return matcher.validate_tokens([*tokens, eos]) == len(tokens) + 1
