"""Detects shards that have stopped answering, so that no request waits for ever."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from text_generation_router.scheduler.deadline import UNMEASURED_S, StepDeadlines
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.shards import (
    Advance,
    CachedBatch,
    GrammarResult,
    LostStepError,
    Shards,
    SilentShardError,
    StepResult,
)

# How often the oldest call is checked.
LOOK_S = 0.25
# A check this late means that this process, or the whole machine, was stopped.
STILL_S = 1.0
# While a call takes longer than this, the shards are asked for their health at this interval.
PATIENCE_S = 5.0
# Healthy shards answer within this. They are declared lost after NUM_QUESTIONS in a row without an
# answer: after a pause of the whole machine the first answer may be late. It is a little longer
# than the timeout of the client, which names the silent rank.
ANSWER_S = 5.5
NUM_QUESTIONS = 3
# With several shards the other ranks report the one that hangs, with more detail: they come first.
NUM_QUESTIONS_TO_SEVERAL = 4

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Call:
    """A call in flight."""

    # Without a time limit of its own: `_declare_lost` sets it.
    scope: asyncio.Timeout
    # When the shards could begin with it, in the loop's time.
    since: float
    allowed_s: float


class WatchedShards:
    """The same `Shards`, but every call ends within its deadline.

    A call without an answer within its deadline has failed, even if the shards are healthy. Its
    time begins when the calls before it have ended. While a step takes long, the shards are asked
    for their health, which they answer while they compute; silent shards are declared lost before
    the deadline. While this process is stopped no time passes: the shards may be stopped with it.

    If the shards are declared lost, or one of them does not answer a call that the others have
    answered, all calls in flight and all later calls fail with LostStepError. `verdict` says why,
    and the process should end, so that its supervisor restarts everything.
    """

    def __init__(
        self,
        shards: Shards,
        deadlines: StepDeadlines | None = None,
        num_questions: int = NUM_QUESTIONS,
    ) -> None:
        self.verdict: str | None = None
        """Why the shards were declared lost; None while they are not."""
        self.detail = ""
        """The error of the last health check, which may name sockets; for the log."""
        self.report_loss: Callable[[str], None] | None = None
        """Called once, with the verdict."""
        self._num_questions = num_questions
        self._shards = shards
        self._deadlines = deadlines or StepDeadlines.fixed(UNMEASURED_S)
        # Oldest first.
        self._calls: list[_Call] = []
        self._timer: asyncio.TimerHandle | None = None
        self._looked = 0.0
        self._question: asyncio.Task[None] | None = None
        # Earliest time of the next health check, in the loop's time.
        self._next_question = 0.0

    @property
    def is_down(self) -> bool:
        """Whether new shards are awaited: never, these are not replaced."""
        return False

    async def prefill(
        self,
        batch_id: int,
        entries: Sequence[Entry],
        cached_batch_id: int | None,
        advance: Advance | None = None,
    ) -> StepResult:
        """See `Shards.prefill`."""
        num_tokens = sum(map(_num_new_tokens, entries)) + _num_prompt_tokens(advance)
        return await self._watched(
            num_tokens, self._shards.prefill, batch_id, entries, cached_batch_id, advance
        )

    async def decode(self, batch_ids: Sequence[int], advance: Advance) -> StepResult:
        """See `Shards.decode`."""
        num_tokens = _num_prompt_tokens(advance)
        return await self._watched(num_tokens, self._shards.decode, batch_ids, advance)

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        """See `Shards.filter_batch`."""
        return await self._watched(0, self._shards.filter_batch, batch_id, request_ids)

    async def clear_cache(self, batch_id: int | None) -> None:
        """See `Shards.clear_cache`."""
        await self._watched(0, self._shards.clear_cache, batch_id)

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        """See `Shards.compile_grammar`, which has a timeout of its own."""
        return await self._shards.compile_grammar(grammar, timeout_s)

    async def health(self) -> None:
        """See `Shards.health`."""
        self._check()
        await self._shards.health()

    def _check(self) -> None:
        if self.verdict is not None:
            raise LostStepError(self.verdict, self.detail)

    async def _watched(
        self,
        num_prompt_tokens: int,
        call: Callable[_Arguments, Awaitable[_Answer]],
        *arguments: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> _Answer:
        self._check()
        loop = asyncio.get_running_loop()
        scope = asyncio.timeout(None)
        own = _Call(scope, loop.time(), self._deadlines.of(num_prompt_tokens))
        try:
            async with scope:
                self._calls.append(own)
                if self._timer is None:
                    self._looked = own.since
                    self._timer = loop.call_later(LOOK_S, self._look)
                return await call(*arguments, **options)
        except SilentShardError as error:
            self._end(own)
            self._declare_lost(str(error))
            raise
        except TimeoutError:
            self._check()
            raise
        finally:
            self._end(own)

    def _end(self, call: _Call) -> None:
        """The time of the next call begins. May be repeated."""
        if call not in self._calls:
            return
        is_oldest = self._calls[0] is call
        self._calls.remove(call)
        if is_oldest and self._calls:
            self._calls[0].since = asyncio.get_running_loop().time()

    def _look(self) -> None:
        """Declares the shards lost if the oldest call has passed its deadline, and asks for their
        health if it takes long; runs again while there are calls."""
        self._timer = None
        if not self._calls:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        if (late_s := now - self._looked - LOOK_S) > STILL_S:
            for call in self._calls:
                # A call that began after the last check may have begun before or after the pause.
                is_older = call.since <= self._looked
                call.since = call.since + late_s if is_older else max(call.since, now - LOOK_S)
            self._next_question = now + PATIENCE_S
        self._looked = now
        oldest = self._calls[0]
        lasted_s = now - oldest.since
        if lasted_s > oldest.allowed_s:
            self._declare_lost(
                f"The shards have not finished a step within {oldest.allowed_s:.3g} s"
            )
            return
        may_ask = self._question is None and now >= self._next_question
        if lasted_s > PATIENCE_S and may_ask:
            self._question = loop.create_task(self._ask(oldest))
        self._timer = loop.call_later(LOOK_S, self._look)

    async def _ask(self, call: _Call) -> None:
        is_alive = await self._is_alive()
        self._question = None
        loop = asyncio.get_running_loop()
        self._next_question = loop.time() + PATIENCE_S
        if not is_alive and call in self._calls:
            lasted_s = loop.time() - call.since
            self._declare_lost(f"The shards have not answered for {lasted_s:.0f} s")

    async def _is_alive(self) -> bool:
        for _ in range(self._num_questions):
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._shards.health()
            except Exception as error:
                # Any failure counts: no code awaits this task, and an exception here would end the
                # watch, so that requests could wait for ever.
                self.detail = str(error) or type(error).__name__
                logger.warning("A step takes long, and the shards are silent: %s", self.detail)
            else:
                self.detail = ""
                return True
        return False

    def _declare_lost(self, verdict: str) -> None:
        """Declares the shards lost, once: all calls in flight end."""
        if self.verdict is not None:
            return
        self.verdict = verdict
        if self.report_loss is not None:
            self.report_loss(verdict)
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            call.scope.reschedule(now)


def _num_new_tokens(entry: Entry) -> int:
    """Scheduled tokens of an entry that joins."""
    return entry.chunk_len or len(entry.input_ids) - entry.num_cached_tokens


def _num_prompt_tokens(advance: Advance | None) -> int:
    """Scheduled prompt tokens of running rows."""
    if advance is None or not advance.chunks:
        return 0
    return sum(num_tokens for _, num_tokens in advance.chunks)
