"""Compiled grammars, and the state of one request in its grammar. Does not import torch.

A `Grammar` is compiled once and shared; each row with a grammar owns a `Constraint`, its state.
Chosen tokens advance the constraint. Near `max_new_tokens`, a token after which the text could no
longer end in time is replaced by the next token of a known ending.
"""

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from text_generation_shard.grammars.ending import EndingSearch, Position, ends
from text_generation_shard.grammars.leniency import endless_line, lenient_text

# Limits of one grammar, in llguidance's units. They bound the time of compilation and masks, and
# the lexer's memory, except for intersections of patterns, which are computed before the check.
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
    "no text matches it: its parts exclude one another, or contain one another without an end; "
    "change these parts"
)
# A grammar whose shortest text is longer is refused.
_LONGEST_ENDING = 4096
# Steps of a search for an ending where the shortest one is refused: during compilation, and during
# generation.
_THOROUGH, _QUICK = 20_000, 500
# Most searches without success during a generation: each delays other requests.
_MOST_FAILED = 8
# With at most so many tokens left, a text needs a known ending.
_FEW = 8
# A new token may replace up to this many tokens of the known ending.
_REPLACED = 3
# Most tokens by which one token is assumed to prolong the shortest ending: beyond what the places
# of a plain grammar say, and for other grammars. Checks are early enough for the ending to fit.
_GROWTH_BEYOND, _GROWTH = 3, 64
# Matches sources of characters that take several tokens each.
_NOT_PLAIN = re.compile(r"[^\x00-\x7f]|\\+[uUxpP]|\[\^")
# Shown characters of a long error: its beginning and its end; between is mostly the user's pattern.
_SHOWN_FIRST, _SHOWN_LAST = 120, 80
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*')
# Numbered source lines in an error, and the marks below them.
_SOURCE_LINE = re.compile(r"\s*(\d+ \|.*|\^+\s*)$")
_PLACE = re.compile(r"at (\d+)\(\d+\): ")


class GrammarError(ValueError):
    """This request can not go on; other requests can. The message is one sentence for its user."""


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """The path of a model's tokenizer, and its sizes from the model's configuration."""

    path: Path
    vocab_size: int
    eos_ids: tuple[int, ...]

    def load(self) -> LLTokenizer:
        """llguidance's tokenizer; GrammarError if the file can not be used.

        Added tokens are text, as in answers, unless they are special or end tokens.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
            try:
                return self._made_of(text)
            except ValueError:
                return self._made_of(_without_added(self.vocab_size, text))
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise GrammarError(
                f"grammars do not work with this model's {self.path.name}: {error}"
            ) from error

    def _made_of(self, text: str) -> LLTokenizer:
        size, end_tokens = self.vocab_size, list(self.eos_ids) or None
        are_text = _added(text) - {*self.eos_ids}
        # llguidance takes all added tokens for special ones.
        slices: list[str] | None = [] if are_text else None
        own = LLTokenizer(text, n_vocab=size, eos_token=end_tokens, slices=slices)
        if not are_text:
            return own
        spelling = TokenizerWrapper(_Spelling(own, are_text))
        return LLTokenizer(spelling, n_vocab=size, eos_token=end_tokens)


def _without_added(vocab_size: int, text: str) -> str:
    """A tokenizer.json without the added tokens that the model does not have."""
    content = json.loads(text)
    missing = [token for token in content["added_tokens"] if token["id"] >= vocab_size]
    for token in missing:
        content["added_tokens"].remove(token)
        if isinstance(vocabulary := content["model"]["vocab"], dict):
            vocabulary.pop(token["content"], None)
    return json.dumps(content)


def _added(tokenizer: str) -> set[int]:
    """The ids of added tokens that are not special. The rest of the file may be large."""
    if (key := _ADDED_TOKENS.search(tokenizer)) is None:
        return set()
    tokens, _ = json.JSONDecoder().raw_decode(tokenizer, key.end())
    return {token["id"] for token in tokens or () if not token["special"]}


class _Spelling:
    """What llguidance asks of a tokenizer, in which `are_text` are no special tokens."""

    bos_token_id = None

    def __init__(self, tokenizer: LLTokenizer, are_text: Set[int]) -> None:
        ids = range(tokenizer.vocab_size)
        self.eos_token_id = tokenizer.eos_token
        self.tokens = [tokenizer.decode_bytes([token]) for token in ids]
        self.special_token_ids = [
            token for token in ids if tokenizer.is_special_token(token) and token not in are_text
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.tokenize_bytes(text)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, or the reason why it can not be used."""

    error: str = ""
    start: LLMatcher | None = None
    search: EndingSearch | None = None
    eos_ids: tuple[int, ...] = ()
    # The start of its texts, and the tokens of a short text.
    position: Position | None = None
    ending: tuple[int, ...] = ()
    # Whether its shortest texts are ASCII, so that a character takes at most one token.
    is_plain: bool = False
    # Not 0: it was not compiled, and may be requested again after this many seconds.
    retry_after_s: int = 0

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest known text, without an end token; at least 1, as max_new_tokens
        can not be less."""
        return 0 if self.error else max(1, len(self.ending))

    @property
    def has_ended(self) -> bool:
        """Whether it was compiled in a process that has ended, and must be compiled again."""
        return False


def compile_text(
    tokenizer: LLTokenizer,
    search: EndingSearch,
    text: str,
    ending: Sequence[int] | None = None,
) -> Grammar:
    """Compile a grammar in llguidance's form. `ending`: its ending, if known from its trial."""
    matcher = _matcher(tokenizer, text)
    known: dict[str, bool] = {}
    # The schemas of tools that are not strict are changed until none is refused.
    while (refused := _refused(matcher, search, text)) is not None:
        line, why = refused
        changed = lenient_text(text, line, partial(_compiles, tokenizer, search, known))
        if changed is None:
            return Grammar(f"line {line}: {why}" if line else why)
        text, matcher = changed, _matcher(tokenizer, changed)
    position = search.begin(text)
    if position is None:
        return Grammar(_NO_TEXT)
    if ending is None:
        ending = search.find(matcher, position, _LONGEST_ENDING, _THOROUGH)
    if ending is None:
        # A limit that is exceeded after the forced first tokens has its own error.
        if matcher.consume_tokens(matcher.compute_ff_tokens()):
            matcher.compute_bitmask()
            if matcher.is_error():
                return Grammar(sentence(matcher.get_error()))
        return Grammar(_not_found(position))
    eos_ids, is_plain = tuple(tokenizer.eos_tokens), not _NOT_PLAIN.search(text)
    return Grammar("", matcher, search, eos_ids, position, tuple(ending), is_plain)


def _matcher(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    return LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)


def _refused(matcher: LLMatcher, search: EndingSearch, text: str) -> tuple[int, str] | None:
    """The line of a grammar that is at fault, if that is known, and why; None: no fault is."""
    if matcher.is_error():
        error = matcher.get_error()
        found = _PLACE.match(error)
        return int(found[1]) if found else 0, sentence(error)
    line = endless_line(text, lambda schema: search.begin(_schema_text(schema)) is not None)
    return (line, _NO_TEXT) if line else None


def _schema_text(schema: Mapping[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _compiles(
    tokenizer: LLTokenizer, search: EndingSearch, known: dict[str, bool], schema: Mapping[str, Any]
) -> bool:
    """Whether a tool's schema that is not strict can be compiled, and has a text. `known`: by
    schema, because the parts of tools are often the same."""
    text = _schema_text({**schema, "x-guidance": {"lenient": True}})
    if text not in known:
        known[text] = not _matcher(tokenizer, text).is_error() and search.begin(text) is not None
    return known[text]


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
    """The state of one request in its grammar. Changed only between two forward passes.

    If `max_new_tokens` is at least `Grammar.min_tokens`, the text is complete within
    `max_new_tokens`, or the request fails. It fails only where no ending is found and few tokens
    are left: a text may go on to where one is.
    """

    def __init__(
        self, grammar: Grammar, generated: Sequence[int], max_new_tokens: int, min_new_tokens: int
    ) -> None:
        """`generated`: the tokens chosen before a preemption.

        Before `min_new_tokens` an end token is allowed only if no other token is.
        """
        self.failure = grammar.error
        """Why this request can not go on."""
        self.is_driven = False
        """Whether a token was replaced so that the text ends in time."""
        self.eos_ids = grammar.eos_ids
        self._max_new_tokens = max_new_tokens
        self._min_new_tokens = min_new_tokens
        self._num_tokens = 0
        # An ending of the text after `_ending_at` tokens.
        self._ending, self._ending_at = list(grammar.ending), 0
        self._is_plain = grammar.is_plain
        self._growth = _GROWTH_BEYOND
        self._next_check = 0
        self._num_failed = 0
        if grammar.start is None or grammar.search is None or grammar.position is None:
            return
        self._search = grammar.search
        self._position = self._ending_position = grammar.position
        self.matcher = grammar.start.deep_copy()
        for token in generated:
            if self.settle(token) != token and not self.failure:
                self.failure = "what was generated before does not follow the grammar"

    def may_end_after(self, count: int) -> bool:
        """Whether an end token is allowed beside other tokens after `count` more tokens."""
        return self._num_tokens + count >= self._min_new_tokens

    def allowed(self, guesses: Sequence[int]) -> Sequence[int]:
        """The longest allowed prefix of the guesses, without end tokens."""
        ends = [place for place, token in enumerate(guesses) if token in self.eos_ids]
        if self.failure or not guesses:
            return ()
        return guesses[: self.matcher.validate_tokens(list(guesses[: ends[0] if ends else None]))]

    def masks(self, guesses: Sequence[int]) -> list[bytes]:
        """The masks of allowed tokens here and after each guess, up to the first forbidden one.

        Sets `failure` if they can not be computed.
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
        """Write `token`, or the one that must replace it; returns the written token.

        Sets `failure` if neither is possible.
        """
        if self.failure:
            return token
        room = self._max_new_tokens - self._num_tokens
        position = self._search.advance(self._position, [token])
        is_due = self._num_tokens >= self._next_check or self._needs_care(position, room - 1)
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

    def _needs_care(self, position: Position, limit: int) -> bool:
        """Whether the ending may now be longer than `limit` tokens."""
        if not self._knows_growth(position):
            return position.needs_care(limit)
        return len(self._ending) + position.growth(self._ending_position) > limit

    def _knows_growth(self, position: Position) -> bool:
        """Whether the places bound the growth of the ending."""
        return self._is_plain and bool(position.places) and bool(self._ending_position.places)

    def _checked(self, token: int, position: Position, room: int) -> tuple[int, Position]:
        """`token` and its `position` if the text can still end after it, else the first token of
        the ending and its position. `room`: tokens left, including this one."""
        ending = self._ending_after(token, position, room - 1)
        if ending is None:
            if self._ending_at != self._num_tokens:
                found = self._search.find(self.matcher, self._position, room, _QUICK)
                self._num_failed += found is None
                if found is None and room > _FEW and self._num_failed < _MOST_FAILED:
                    self._next_check = self._num_tokens + room // 2
                    return token, position
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
        self._ending_position = position
        slack = room - 1 - len(ending)
        growth = self._growth if self._knows_growth(position) else max(self._growth, _GROWTH)
        self._next_check = self._ending_at + max(0, slack) // (growth + 1)
        return token, position

    def _ending_after(self, token: int, position: Position, limit: int) -> list[int] | None:
        """At most `limit` tokens that end the text once `token` is written."""
        ending = self._ending
        # Most tokens keep the ending, or replace its first tokens.
        for start in range(max(0, len(ending) - limit), min(_REPLACED, len(ending)) + 1):
            if ends(self.matcher, [token, *ending[start:]], self.eos_ids[0]):
                return ending[start:]
        after = self.matcher.deep_copy()
        if position.is_too_far(limit) or not after.consume_token(token):
            return None
        return self._search.find(after, position, limit, _QUICK)


def sentence(error: str) -> str:
    """An error of llguidance as one line, without backtrace and positions in our Lark."""
    if error.startswith("NoExtension"):
        return _NO_TEXT
    plain = error.partition("<backtrace>")[0].replace("<non-verbose/>", "")
    plain = _PLACE.sub("", plain)
    told = [line for line in plain.splitlines() if not _SOURCE_LINE.match(line)]
    line = " ".join(" ".join(told).split()) or "the grammar has failed"
    if len(line) > _SHOWN_FIRST + _SHOWN_LAST:
        line = f"{line[:_SHOWN_FIRST]} … {line[-_SHOWN_LAST:]}"
    return f"{line}; make the grammar smaller" if "too many expressions" in line else line
