"""Compiles grammars, with a tokenizer made of the model's. Does not import torch."""

import json
import re
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from text_generation_shard.grammars.ending import EndingSearch
from text_generation_shard.grammars.schemas import excess, lenient_text

# Limits of one grammar, in llguidance's units. They bound the time of compilation and masks, and
# the lexer's memory, except for intersections of patterns, which are computed before the check:
# `intersections` bounds these.
_LIMITS = LLParserLimits(
    max_items_in_row=10_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=10_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
# A grammar is refused if no text of at most LONGEST_ENDING tokens is found. The first searches try
# _NUM_STEPS tokens, those for long texts four times LONGEST_ENDING more: half a second at most.
LONGEST_ENDING, _NUM_STEPS = 4096, 5000
# Most processor time of one of the first masks: 100 times what those of the corpus take.
_NUM_TIMED, _MOST_MASK_S = 64, 0.1
_TOO_SLOW = "it is too complex to be followed: the next tokens take too long; make it smaller"
# Shown characters of a long error: its beginning and its end; between is mostly the user's pattern.
_SHOWN_FIRST, _SHOWN_LAST = 120, 80
# Numbered source lines in an error, and the marks below them.
_SOURCE_LINE = re.compile(r"\s*(\d+ \|.*|\^+\s*)$")
_PLACE = re.compile(r"at (\d+)\(\d+\): ")
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*')


class GrammarError(ValueError):
    """This request can not go on; other requests can. The message is one sentence for its user."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, or the reason why it can not be used; with neither, another rank follows
    it, which broadcasts the chosen tokens to this one."""

    error: str = ""
    start: LLMatcher | None = None
    search: EndingSearch | None = None
    eos_ids: tuple[int, ...] = ()
    # The tokens of a short text.
    ending: tuple[int, ...] = ()
    # With more tokens left, a text needs no known ending: no token needs that many behind it.
    far: int = 0
    # Not 0: it was not compiled, and may be requested again after this many seconds.
    retry_after_s: int = 0

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest known text, without an end token; at least 1, as max_new_tokens
        can not be less."""
        return 0 if self.error else max(1, len(self.ending))


@dataclass(frozen=True, slots=True)
class Tried:
    """A grammar that may be compiled, or the reason why it must not be."""

    error: str
    # Changed if it has tools that are not strict.
    text: str = ""
    # The tokens of a short text.
    ending: Sequence[int] = ()


def try_text(tokenizer: LLTokenizer, text: str) -> Tried:
    """Compile a grammar in llguidance's form, and find one of its texts. It can take any time and
    memory."""
    known: dict[str, bool] = {}
    try:
        # The schemas of tools that are not strict are changed until none is refused.
        while (refused := _refused(tokenizer, text)) is not None:
            line, why = refused
            changed = lenient_text(text, line, partial(_compiles, tokenizer, known))
            if changed is None:
                return Tried(f"line {line}: {why}" if line else why)
            text = changed
    except RecursionError:
        return Tried("it is too complex: nest it less; make it smaller")
    matcher = _matcher(tokenizer, text)
    ending = EndingSearch(tokenizer, source_of(text)).find(matcher, LONGEST_ENDING, _NUM_STEPS)
    if ending is None:
        return Tried(_not_found(matcher))
    return Tried(_TOO_SLOW) if _is_slow(matcher, ending) else Tried("", text, ending)


def compile_tried(tokenizer: LLTokenizer, tried: Tried) -> Grammar:
    """The grammar that was tried. Its cost is known by then."""
    if tried.error:
        return Grammar(tried.error)
    matcher = _matcher(tokenizer, tried.text)
    search = EndingSearch(tokenizer, source_of(tried.text))
    # A rule asks for about as many tokens as it has characters, unless it repeats them.
    far = 256 + 4 * len(tried.ending) + len(tried.text)
    return Grammar("", matcher, search, tuple(tokenizer.eos_tokens), tuple(tried.ending), far)


def source_of(text: str) -> str:
    """The text that a grammar in llguidance's form was written as, with patterns as in Lark."""
    try:
        [part] = json.loads(text)["grammars"]
    except (ValueError, LookupError, TypeError):
        return text
    if "lark_grammar" in part:
        return str(part["lark_grammar"])
    schema = {key: value for key, value in part["json_schema"].items() if key != "x-guidance"}
    written = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return written.replace("\\\\", "\\").replace("/", "\\/")


def _matcher(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    return LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)


def _refused(tokenizer: LLTokenizer, text: str) -> tuple[int, str] | None:
    """The line of a grammar that is at fault, if that is known, and why; None: no fault is."""
    if (found := excess(text)) is not None:
        return found
    if error := _matcher(tokenizer, text).get_error():
        place = _PLACE.match(error)
        return int(place[1]) if place else 0, sentence(error)
    return None


def _compiles(tokenizer: LLTokenizer, known: dict[str, bool], schema: Mapping[str, Any]) -> bool:
    """Whether a tool's schema that is not strict can be compiled. `known`: by schema, because the
    parts of tools are often the same."""
    key = json.dumps(schema)
    if key not in known:
        lenient = {**schema, "x-guidance": {"lenient": True}}
        text = json.dumps({"grammars": [{"json_schema": lenient}]})
        known[key] = excess(text) is None and not _matcher(tokenizer, text).is_error()
    return known[key]


def _is_slow(matcher: LLMatcher, tokens: Sequence[int]) -> bool:
    """Whether a mask on the way of these tokens takes so long that other requests would wait."""
    slowest, following = 0.0, matcher.deep_copy()
    for token in tokens[:_NUM_TIMED]:
        began = time.process_time()
        following.compute_bitmask()
        slowest = max(slowest, time.process_time() - began)
        following.consume_token(token)
    return slowest > _MOST_MASK_S


def _not_found(matcher: LLMatcher) -> str:
    # A limit that is exceeded after the forced first tokens has its own error.
    if matcher.consume_tokens(matcher.compute_ff_tokens()):
        matcher.compute_bitmask()
        if matcher.is_error():
            return sentence(matcher.get_error())
    return (
        f"no text matches it, or none of at most {LONGEST_ENDING} tokens was found; make it "
        "smaller, or change parts that exclude one another, or contain one another without an end"
    )


def sentence(error: str) -> str:
    """An error of llguidance as one line, without backtrace and positions in our Lark."""
    if error.startswith("NoExtension"):
        return (
            "no text matches it: its parts exclude one another, or contain one another without an "
            "end; change these parts"
        )
    plain = error.partition("<backtrace>")[0].replace("<non-verbose/>", "")
    plain = _PLACE.sub("", plain)
    told = [line for line in plain.splitlines() if not _SOURCE_LINE.match(line)]
    line = " ".join(" ".join(told).split()) or "the grammar has failed"
    if len(line) > _SHOWN_FIRST + _SHOWN_LAST:
        line = f"{line[:_SHOWN_FIRST]} … {line[-_SHOWN_LAST:]}"
    if "lexer error" in line:
        return f"the grammar is too complex to be followed: {line}; make it smaller"
    return f"{line}; make the grammar smaller" if "too many expressions" in line else line


def load_tokenizer(path: Path, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """llguidance's tokenizer, made of a model's tokenizer file, with the sizes of the model's
    configuration; GrammarError if the file can not be used.

    Added tokens are text, as in answers, unless they are special or end tokens.
    """
    try:
        text = path.read_text(encoding="utf-8")
        try:
            return _tokenizer_of(text, vocab_size, eos_ids)
        except ValueError:
            return _tokenizer_of(_without_added(vocab_size, text), vocab_size, eos_ids)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise GrammarError(
            f"grammars do not work with this model's {path.name}: {error}"
        ) from error


def _tokenizer_of(text: str, size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    end_tokens, are_text = list(eos_ids) or None, _added(text) - {*eos_ids}
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
