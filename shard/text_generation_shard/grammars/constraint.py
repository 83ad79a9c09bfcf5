"""What a text must look like, and one request's place in it; without torch, for other processes.

A `Grammar` is compiled once and shared; each row that carries it owns a `Constraint`, its place in
the text. The chosen tokens move the constraints on; near `max_new_tokens` a token after which
the text could no longer be ended in time is replaced by the next one of a known ending.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from text_generation_shard.grammars.ending import EndingSearch, Position, ends

# What one grammar may cost. Fuel and items are llguidance's units: a compilation stays below about
# a second, a mask below some tens of milliseconds, and a lexer below about 20 MB, but for
# intersections of patterns, which are computed whole before the fuel is looked at.
_LIMITS = LLParserLimits(
    max_items_in_row=10_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=10_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
_NO_TEXT = (
    "no text matches it: its parts exclude one another, or hold one another without an end; "
    "change what can not be"
)
# A grammar whose shortest text is longer is refused.
_LONGEST_ENDING = 4096
# Steps of a search for a text where the shortest one is refused: while a grammar is compiled, and
# while a text is written.
_THOROUGH, _QUICK = 20_000, 2000
# Tokens of an old ending in whose place a new token may stand.
_REPLACED = 3
# Tokens by which one more token is taken to prolong the shortest ending at most, where its length
# is not known. The ending of a text is looked for so seldom that it still fits if that is so.
_GROWTH = 64
# Characters of an error that are shown: its beginning and its end. What is between is mostly the
# user's pattern.
_SHOWN_FIRST, _SHOWN_LAST = 120, 80
# Numbered lines of a grammar, and what points into them.
_SOURCE_LINE = re.compile(r"\s*(\d+ \|.*|\^+\s*)$")
_PLACE = re.compile(r"at \d+\(\d+\): ")


class GrammarError(ValueError):
    """This request can not go on; one sentence for its user. Others are not affected."""


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """Where a model's tokenizer lies, and what its configuration says about it."""

    path: Path
    vocab_size: int
    eos_ids: tuple[int, ...]

    def load(self) -> LLTokenizer:
        """As llguidance sees it; GrammarError if it can not be used."""
        try:
            return LLTokenizer(
                self.path.read_text(encoding="utf-8"),
                n_vocab=self.vocab_size,
                eos_token=list(self.eos_ids) or None,
            )
        except (OSError, ValueError) as error:
            raise GrammarError(
                f"grammars do not work with this model's {self.path.name}: {error}"
            ) from error


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, or the reason why it can not be used."""

    error: str = ""
    start: LLMatcher | None = None
    search: EndingSearch | None = None
    eos_ids: tuple[int, ...] = ()
    # Where its texts begin, and the tokens of a short one.
    position: Position | None = None
    ending: tuple[int, ...] = ()
    # Not 0: nothing is known about it, and it may be asked for again after so many seconds.
    retry_after_s: int = 0

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest text known, without an end token, which needs no room; one at
        least, as fewer can not be asked for."""
        return 0 if self.error else max(1, len(self.ending))


def compile_text(
    tokenizer: LLTokenizer,
    search: EndingSearch,
    text: str,
    ending: Sequence[int] | None = None,
) -> Grammar:
    """The grammar of a text in llguidance's form. `ending`: of the same text, if it is known."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        return Grammar(sentence(matcher.get_error()))
    position = search.begin(text)
    if position is None:
        return Grammar(_NO_TEXT)
    if ending is None:
        ending = search.find(matcher, position, _LONGEST_ENDING, _THOROUGH)
    if ending is None:
        # A limit that is met behind what must come first has a sentence of its own.
        if matcher.consume_tokens(matcher.compute_ff_tokens()):
            matcher.compute_bitmask()
            if matcher.is_error():
                return Grammar(sentence(matcher.get_error()))
        return Grammar(_not_found(position))
    return Grammar("", matcher, search, tuple(tokenizer.eos_tokens), position, tuple(ending))


def _not_found(position: Position) -> str:
    if position.distance > _LONGEST_ENDING:
        return (
            f"its shortest text has {position.distance:.0f} characters, and more than the "
            f"{_LONGEST_ENDING} tokens that are allowed; make the grammar smaller"
        )
    return (
        f"no text was found that matches among {_THOROUGH} beginnings with at most "
        f"{_LONGEST_ENDING} tokens; make the grammar smaller"
    )


class Constraint:
    """One request's place in its grammar. Changed between two forward passes only.

    Promises: with room for `Grammar.min_tokens` from the start, the text is complete within
    `max_new_tokens`, or the request fails with a GrammarError.
    """

    def __init__(
        self, grammar: Grammar, generated: Sequence[int], max_new_tokens: int, min_new_tokens: int
    ) -> None:
        """`generated`: what was chosen before a preemption; the same states are gone through.

        An end token that is not the only choice is not offered before `min_new_tokens`.
        """
        self.failure = grammar.error
        """Why this request can not go on."""
        self.is_driven = False
        """Whether a token was forced, so that the text could end in time."""
        self.eos_ids = grammar.eos_ids
        self._max_new_tokens = max_new_tokens
        self._min_new_tokens = min_new_tokens
        self._num_tokens = 0
        # An ending of the text as it was after `_ending_at` tokens.
        self._ending, self._ending_at = list(grammar.ending), 0
        self._growth = _GROWTH
        self._next_check = 0
        if grammar.start is None or grammar.search is None or grammar.position is None:
            return
        self._search = grammar.search
        self._position = grammar.position
        self.matcher = grammar.start.deep_copy()
        for token in generated:
            if self.settle(token) != token and not self.failure:
                self.failure = "what was generated before does not follow the grammar"

    def may_end_after(self, count: int) -> bool:
        """Whether an end token may stand among other choices once `count` more are written."""
        return self._num_tokens + count >= self._min_new_tokens

    def allowed(self, guesses: Sequence[int]) -> Sequence[int]:
        """As many of the guessed tokens as may follow one another, none of them an end token."""
        ends = [place for place, token in enumerate(guesses) if token in self.eos_ids]
        if self.failure or not guesses:
            return ()
        return guesses[: self.matcher.validate_tokens(list(guesses[: ends[0] if ends else None]))]

    def masks(self, guesses: Sequence[int]) -> list[bytes]:
        """Bits of the tokens allowed here and behind each of the guesses, up to one that is not.

        Sets `failure` if that can not be found out.
        """
        found = [self.matcher.compute_bitmask()]
        after = self.matcher.deep_copy() if guesses else self.matcher
        for token in guesses:
            if after.is_error() or not after.consume_token(token):
                break
            found.append(after.compute_bitmask())
        if self.matcher.is_error():
            self.failure = sentence(self.matcher.get_error())
        return found

    def settle(self, token: int) -> int:
        """Write `token`, or the one that must be written in its place; returns which.

        Sets `failure` if neither can be.
        """
        if self.failure:
            return token
        room = self._max_new_tokens - self._num_tokens
        position = self._search.advance(self._position, [token])
        is_due = self._num_tokens >= self._next_check or position.needs_care(room - 1)
        if is_due and token not in self.eos_ids:
            try:
                token, position = self._checked(token, position, room)
            except GrammarError as error:
                self.failure = str(error)
                return token
        if not self.matcher.consume_token(token):
            self.failure = sentence(self.matcher.get_error())
        self._position = position
        self._num_tokens += 1
        return token

    def _checked(self, token: int, position: Position, room: int) -> tuple[int, Position]:
        """`token`, which leads to `position`, if the text can still be ended after it, else the
        first token of the ending; and where that leads. `room`: for it and all others."""
        ending = self._ending_after(token, position, room - 1)
        if ending is None:
            if self._ending_at != self._num_tokens:
                found = self._search.find(self.matcher, self._position, room, _QUICK)
                if found is None:
                    raise GrammarError(
                        f"the text can not be completed in the {room} tokens that are left; "
                        "increase max_new_tokens or make the grammar simpler"
                    )
                self._ending = found
            self.is_driven = True
            token, ending = [*self._ending, self.eos_ids[0]][0], self._ending[1:]
            position = self._search.advance(self._position, [token])
        self._growth = max(self._growth, len(ending) - len(self._ending))
        self._ending, self._ending_at = ending, self._num_tokens + 1
        slack = room - 1 - len(ending)
        self._next_check = self._ending_at + max(0, slack) // (self._growth + 1)
        return token, position

    def _ending_after(self, token: int, position: Position, limit: int) -> list[int] | None:
        """At most `limit` tokens that end the text once `token` is written."""
        ending = self._ending
        # Most tokens leave it as it is, or take the place of its first ones.
        for start in range(max(0, len(ending) - limit), min(_REPLACED, len(ending)) + 1):
            if ends(self.matcher, [token, *ending[start:]], self.eos_ids[0]):
                return ending[start:]
        after = self.matcher.deep_copy()
        if position.is_too_far(limit) or not after.consume_token(token):
            return None
        return self._search.find(after, position, limit, _QUICK)


def sentence(error: str) -> str:
    """An error of llguidance in one line, without where in its code or in our Lark it arose."""
    if error.startswith("NoExtension"):
        return _NO_TEXT
    plain = error.partition("<backtrace>")[0].replace("<non-verbose/>", "")
    plain = _PLACE.sub("", plain)
    told = [line for line in plain.splitlines() if not _SOURCE_LINE.match(line)]
    line = " ".join(" ".join(told).split()) or "the grammar has failed"
    if len(line) > _SHOWN_FIRST + _SHOWN_LAST:
        line = f"{line[:_SHOWN_FIRST]} … {line[-_SHOWN_LAST:]}"
    return f"{line}; make the grammar smaller" if "too many expressions" in line else line
