"""The grammars of requests: tried in another process, compiled and cached."""

import asyncio
import json
import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from llguidance import LLTokenizer
from text_generation_process.worker import (
    Worker,
    WorkerClosedError,
    WorkerError,
    WorkerStartError,
    WorkerTimeoutError,
)

from text_generation_shard.grammars.grammar import (
    Grammar,
    GrammarError,
    Tried,
    compile_tried,
    load_tokenizer,
    try_text,
)

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
_TOO_SLOW = "it is too complex: compiling it takes too long; make it smaller"
_TOO_LARGE = (
    "it is too large: compiling it takes too long or needs too much memory; make it smaller"
)
_BUSY = "other large grammars are being compiled; try again later"
_LOST = "the process that compiles grammars has ended; try again later"


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
            return Grammar(_TOO_SLOW)
        except (WorkerStartError, WorkerClosedError):
            return Grammar(_LOST, retry_after_s=_RETRY_AFTER_S)
        except WorkerError:
            tried = Tried(_TOO_LARGE)
        if tried is None:
            return Grammar(_BUSY, retry_after_s=_RETRY_AFTER_S)
        grammar = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._compile_tried, tried
        )
        self._remember(text, grammar)
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

    def _remember(self, text: str, grammar: Grammar) -> None:
        self._known[text] = grammar
        self._known_bytes += len(text)
        while len(self._known) > _CACHED_GRAMMARS or self._known_bytes > _CACHED_BYTES:
            self._known_bytes -= len(self._known.popitem(last=False)[0])

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
