"""The grammars of requests: tried in another process, compiled and cached."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLTokenizer

from text_generation_shard.grammars.constraint import (
    Constraint,
    Grammar,
    GrammarError,
    TokenizerFile,
    compile_text,
)
from text_generation_shard.grammars.ending import EndingSearch
from text_generation_shard.grammars.guard import GuardedGrammar
from text_generation_shard.grammars.trial import Trial, Trials, TrialServer, may_grow

__all__ = ["Constraint", "Grammar", "GrammarCompiler", "GrammarError"]

# Limits of the cache of compiled grammars.
_CACHED_GRAMMARS, _CACHED_BYTES = 64, 64 << 20
# Assumed size of a small grammar, and of the process of a guarded one.
_LEAST_BYTES, _PROCESS_BYTES = 64 << 10, 6 << 20
# A grammar whose trial took more memory or time than this stays in its process. Small grammars
# grow a process by up to 1.1 MiB, as the allocator takes memory from the kernel in steps of 1 MiB.
_LARGE_BYTES, _SLOW_S = 2 << 20, 0.2


@dataclass(slots=True)
class _Asked:
    """A compilation in progress, and the number of callers that wait for it."""

    task: "asyncio.Task[Grammar]"
    num_waiting: int = 0


class GrammarCompiler:
    """Owns llguidance's tokenizer, the process for trials, and the compiled grammars.

    `compile` is called from one event loop. It compiles a grammar in this process only after a
    trial in another process, within limits of time and memory.
    """

    def __init__(self, model_path: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._file = TokenizerFile(model_path / "tokenizer.json", vocab_size, tuple(eos_ids))
        self._lock = threading.Lock()
        self._tools: tuple[LLTokenizer, EndingSearch] | None = None
        # The kernel ends the process for trials together with the thread that started it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._server = TrialServer(self._file)
        self._trials = Trials(self._server, self._thread)
        self._asked: dict[str, _Asked] = {}
        # With the estimated bytes of each.
        self._known: OrderedDict[str, tuple[Grammar, int]] = OrderedDict()
        self._known_bytes = 0

    async def compile(self, text: str) -> Grammar:
        """The grammar of a text in llguidance's form; a cached one is returned at once, unless its
        process has ended.

        Concurrent calls with the same text share one trial, which is cancelled with the last of
        these calls.
        """
        if (known := self._known.get(text)) is not None:
            if not known[0].has_ended:
                self._known.move_to_end(text)
                return known[0]
            self._known_bytes -= self._known.pop(text)[1]
        is_again = known is not None
        asked = self._asked.get(text)
        if asked is None:
            asked = self._asked[text] = _Asked(asyncio.create_task(self._compile(text, is_again)))
        asked.num_waiting += 1
        try:
            return await asyncio.shield(asked.task)
        finally:
            asked.num_waiting -= 1
            if not asked.num_waiting:
                asked.task.cancel()
                if self._asked.get(text) is asked:
                    del self._asked[text]

    async def _compile(self, text: str, is_again: bool) -> Grammar:
        trial = await self._trials.run(text)
        is_guarded = trial.grown_bytes > _LARGE_BYTES or trial.used_s > _SLOW_S or may_grow(text)
        if trial.error:
            grammar = Grammar(trial.error, retry_after_s=trial.retry_after_s)
        elif is_guarded and trial.child is not None:
            guard = trial.child.guard(is_again)
            grammar = GuardedGrammar(eos_ids=trial.eos_ids, ending=trial.ending, guard=guard)
        else:
            self._trials.done_with(trial)
            loop = asyncio.get_running_loop()
            grammar = await loop.run_in_executor(self._thread, self._compile_tried, text, trial)
        if not trial.retry_after_s:
            size = _PROCESS_BYTES if is_guarded and not trial.error else _LEAST_BYTES
            self._remember(text, grammar, len(text) + size + trial.grown_bytes)
        return grammar

    def _remember(self, text: str, grammar: Grammar, size: int) -> None:
        self._known[text] = grammar, size
        self._known_bytes += size
        while len(self._known) > _CACHED_GRAMMARS or (
            self._known_bytes > _CACHED_BYTES and len(self._known) > 1
        ):
            self._known_bytes -= self._known.popitem(last=False)[1][1]

    def _compile_tried(self, text: str, trial: Trial) -> Grammar:
        try:
            return compile_text(*self._load(), text, trial.ending)
        except GrammarError as error:
            return Grammar(str(error))

    def compile_now(self, text: str) -> Grammar:
        """Compile in this thread, without a trial or the cache."""
        try:
            return compile_text(*self._load(), text)
        except GrammarError as error:
            return Grammar(str(error))

    def prepare(self) -> None:
        """Start to load the tokenizer in a thread, which is slow with large vocabularies. A failure
        is reported by `compile`."""
        self._thread.submit(self._load)

    def start(self) -> None:
        """Start the process for trials in the background."""
        self._thread.submit(self._server.start)

    def close(self) -> None:
        """Accept no more, and end all trials."""
        self._trials.close()
        self._thread.submit(self._server.close)
        self._thread.shutdown(wait=True)

    def _load(self) -> tuple[LLTokenizer, EndingSearch]:
        with self._lock:
            if self._tools is None:
                tokenizer = self._file.load()
                self._tools = tokenizer, EndingSearch(tokenizer)
            return self._tools
