"""The grammars of requests: tried in another process, compiled with a tokenizer made of the
model's, and cached. Does not import torch."""

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from text_generation_process.worker import (
    Worker,
    WorkerClosedError,
    WorkerError,
    WorkerStartError,
    WorkerTimeoutError,
)

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

# Limits of the cache of compiled grammars: their number, and the bytes of their texts.
_CACHED_GRAMMARS, _CACHED_BYTES = 64, 1 << 20
# Most memory that a trial may add: 50 times what the largest schemas of the corpus take.
_MEMORY_BYTES = 256 << 20
# Elapsed time of a short and of a long trial, which limit their processor time themselves.
# Where the short one fails, a long one follows, for few grammars at a time: small grammars do not
# wait behind large ones.
_TIMEOUTS_S = {"short": 3.0, "long": 6.0}
_NUM_SHORT, _NUM_LONG = 8, 2
# Most processor time of a trial. Usual ones take 5 ms, 100 tools 100 ms.
_SHORT_S, _LONG_S = 0.2, 1.5
# The priority of a long trial, in favour of the model.
_NICE = 5
# A grammar that was not tried may be requested again after this time.
_RETRY_AFTER_S = 2
_TOO_LONG = "it is too complex: compiling it takes too long; make it smaller"
_TOO_LARGE = (
    "it is too large: compiling it takes too long or needs too much memory; make it smaller"
)
_BUSY = "other large grammars are being compiled; try again later"
_LOST = "the process that compiles grammars has ended; try again later"


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


class GrammarCompiler:
    """Owns llguidance's tokenizer, the worker for trials, and the compiled grammars.

    `compile` is called from one event loop. It compiles a grammar in this process only after a
    trial in another process, within limits of time and memory.
    """

    def __init__(self, model_path: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        path = model_path / "tokenizer.json"
        self._make_tokenizer = partial(load_tokenizer, path, vocab_size, eos_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        arguments = json.dumps([str(path), vocab_size, list(eos_ids)]).encode()
        self._worker = Worker(__name__, arguments, memory_bytes=_MEMORY_BYTES)
        self._threads = ThreadPoolExecutor(_NUM_SHORT + _NUM_LONG, thread_name_prefix="grammar")
        self._num_long = 0
        self._tasks: dict[str, asyncio.Task[Grammar]] = {}
        self._known: OrderedDict[str, Grammar] = OrderedDict()
        self._known_bytes = 0

    async def compile(self, text: str) -> Grammar:
        """The grammar of a text in llguidance's form; a cached one is returned at once.

        Concurrent calls with the same text share one trial.
        """
        if (known := self._known.get(text)) is not None:
            self._known.move_to_end(text)
            return known
        if (task := self._tasks.get(text)) is None:
            task = self._tasks[text] = asyncio.create_task(self._compile(text))
            task.add_done_callback(lambda _: self._tasks.pop(text))
        return await asyncio.shield(task)

    async def _compile(self, text: str) -> Grammar:
        try:
            tried = await self._tried(text)
        except WorkerTimeoutError:
            # Not remembered: the machine may have stood still.
            return Grammar(_TOO_LONG)
        except (WorkerStartError, WorkerClosedError):
            return Grammar(_LOST, retry_after_s=_RETRY_AFTER_S)
        except WorkerError:
            tried = Tried(_TOO_LARGE)
        if tried is None:
            return Grammar(_BUSY, retry_after_s=_RETRY_AFTER_S)
        grammar = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._compile_tried, tried
        )
        self._known[text] = grammar
        self._known_bytes += len(text)
        while len(self._known) > _CACHED_GRAMMARS or self._known_bytes > _CACHED_BYTES:
            self._known_bytes -= len(self._known.popitem(last=False)[0])
        return grammar

    async def _tried(self, text: str) -> Tried | None:
        """None: too many long trials are running. Raises WorkerError."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._try, "short", text)
        except WorkerClosedError:
            raise
        except WorkerError:
            # It takes long, or was killed from outside.
            if self._num_long >= _NUM_LONG:
                return None
        self._num_long += 1
        try:
            return await loop.run_in_executor(self._threads, self._try, "long", text)
        finally:
            self._num_long -= 1

    def _try(self, kind: str, text: str) -> Tried:
        return Tried(*json.loads(self._worker.call(kind, text.encode(), _TIMEOUTS_S[kind])))

    def _compile_tried(self, tried: Tried) -> Grammar:
        try:
            return compile_tried(self._load(), tried)
        except GrammarError as error:
            return Grammar(str(error))

    def prepare(self) -> None:
        """Start to load the tokenizer in a thread, which is slow with large vocabularies. A failure
        is reported by `compile`."""
        self._threads.submit(self._load)

    def start(self) -> None:
        """Start the worker in the background. A failure is reported by `compile`."""
        self._threads.submit(self._worker.start)

    def close(self) -> None:
        """Accept no more, and end all trials."""
        self._worker.close()
        self._threads.shutdown(wait=True)

    def _load(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
            return self._tokenizer


# ---- In the process ----


def prepare(arguments: bytes) -> "_Trials":
    """Load the tokenizer: its path, the size of the vocabulary, the end tokens."""
    path, vocab_size, eos_ids = json.loads(arguments)
    try:
        return _Trials(load_tokenizer(Path(path), vocab_size, eos_ids))
    except GrammarError as error:
        return _Trials(error)


class _Trials:
    """The calls of the worker. They answer with the fields of `Tried`."""

    def __init__(self, tokenizer: LLTokenizer | GrammarError) -> None:
        self._tokenizer = tokenizer

    def short(self, text: bytes) -> bytes:
        """Try one grammar."""
        return self._try(text, _SHORT_S)

    def long(self, text: bytes) -> bytes:
        """Try one grammar with less priority, which this process keeps."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        return self._try(text, _LONG_S)

    def _try(self, text: bytes, most_s: float) -> bytes:
        if isinstance(self._tokenizer, GrammarError):
            tried = Tried(str(self._tokenizer))
        else:
            signal.setitimer(signal.ITIMER_PROF, most_s)  # its default action ends the process
            tried = try_text(self._tokenizer, text.decode())
            signal.setitimer(signal.ITIMER_PROF, 0)
        return json.dumps([tried.error, tried.text, list(tried.ending)]).encode()
