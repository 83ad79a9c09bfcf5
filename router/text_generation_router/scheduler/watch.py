"""Notices shards that have stopped answering, so that no request waits for them for ever."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import ParamSpec, TypeVar

from text_generation_router.scheduler.chunked_prefill import StepCosts
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

# A call that takes longer makes us ask whether the shards live, again and again while it lasts.
PATIENCE_S = 5.0
# They answer within this, or they did not hear; so many times in a row they must not have heard.
# (When a whole machine was asleep, the first question is late through no fault of theirs.) It is a
# little more than what the client gives each of several, so that it says who is silent.
ANSWER_S = 5.5
NUM_QUESTIONS = 3
# With several shards the others give up the one that hangs (after 20 s, if nothing else is said);
# they know better what has happened, and should be first.
NUM_QUESTIONS_TO_SEVERAL = 4
# A call that takes so long is not finished by shards that live, either: their device is stuck.
STUCK_S = 300.0
STUCK_FACTOR = 20.0

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")

logger = logging.getLogger(__name__)


class WatchedShards:
    """The same `Shards`, on which nobody waits for ever.

    While a step takes long they are asked for their health, which they tell while they compute. If
    they do not answer, or answer but do not end the step, or if one of them does not answer what
    the others have, what is under way fails with LostStepError, and so does all that follows:
    `verdict` says why, and the process should end, so that its supervisor starts everything anew.
    """

    def __init__(
        self,
        shards: Shards,
        longest_call_s: float = STUCK_S,
        num_questions: int = NUM_QUESTIONS,
    ) -> None:
        self.verdict: str | None = None
        """Why the shards were given up; None while they were not."""
        self.detail = ""
        """What the last unanswered question has said, which may name sockets; for the log."""
        self._num_questions = num_questions
        self._shards = shards
        self._longest_call_s = longest_call_s
        # The calls under way and when they began, oldest first.
        self._calls: dict[asyncio.Timeout, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._question: asyncio.Task[None] | None = None

    async def prefill(
        self,
        batch_id: int,
        entries: Sequence[Entry],
        cached_batch_id: int | None,
        advance: Advance | None = None,
    ) -> StepResult:
        """See `Shards.prefill`."""
        return await self._watched(
            self._shards.prefill, batch_id, entries, cached_batch_id, advance
        )

    async def decode(self, batch_ids: Sequence[int], advance: Advance) -> StepResult:
        """See `Shards.decode`."""
        return await self._watched(self._shards.decode, batch_ids, advance)

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        """See `Shards.filter_batch`."""
        return await self._watched(self._shards.filter_batch, batch_id, request_ids)

    async def clear_cache(self, batch_id: int | None) -> None:
        """See `Shards.clear_cache`."""
        await self._watched(self._shards.clear_cache, batch_id)

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        """See `Shards.compile_grammar`; its time is limited anyway."""
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
        call: Callable[_Arguments, Awaitable[_Answer]],
        *arguments: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> _Answer:
        self._check()
        loop = asyncio.get_running_loop()
        # Without a time limit of its own: `_give_up` sets it.
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._calls[scope] = loop.time()
                if self._timer is None and self._question is None:
                    self._timer = loop.call_later(PATIENCE_S, self._look)
                return await call(*arguments, **options)
        except SilentShardError as error:
            del self._calls[scope]  # it has ended
            self._give_up(str(error))
            raise
        except TimeoutError:
            self._check()
            raise
        finally:
            self._calls.pop(scope, None)

    def _look(self) -> None:
        """Asks for the health of the shards if a call has taken long; looks again if there is one
        that may."""
        self._timer = None
        if not self._calls:
            return
        loop = asyncio.get_running_loop()
        scope, began = next(iter(self._calls.items()))
        lasted_s = loop.time() - began
        if lasted_s < PATIENCE_S:
            self._timer = loop.call_later(PATIENCE_S - lasted_s, self._look)
        elif lasted_s > self._longest_call_s:
            self._give_up(f"The shards have not finished a step within {lasted_s:.0f} s")
        else:
            self._question = loop.create_task(self._ask(scope))

    async def _ask(self, scope: asyncio.Timeout) -> None:
        is_alive = await self._is_alive()
        self._question = None
        loop = asyncio.get_running_loop()
        if not is_alive and (began := self._calls.get(scope)) is not None:
            self._give_up(f"The shards have not answered for {loop.time() - began:.0f} s")
        elif self._calls:
            self._timer = loop.call_later(PATIENCE_S, self._look)

    async def _is_alive(self) -> bool:
        for _ in range(self._num_questions):
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._shards.health()
            except Exception as error:
                # Whatever went wrong, they have not answered. Nobody waits for this task: a failure
                # that it did not count would end the watch, and requests could wait for ever.
                self.detail = str(error) or type(error).__name__
                logger.warning("A step takes long, and the shards are silent: %s", self.detail)
            else:
                self.detail = ""
                return True
        return False

    def _give_up(self, verdict: str) -> None:
        """Once: what is under way then ends, and nothing is asked afterwards."""
        if self.verdict is not None:
            return
        self.verdict = verdict
        now = asyncio.get_running_loop().time()
        for scope in self._calls:
            scope.reschedule(now)


def longest_call_s(costs: StepCosts, num_rows: int, num_prompt_tokens: int) -> float:
    """What no step of so many rows and prompt tokens ever takes."""
    decode_ns = costs.decode_step_ns * max(1.0, num_rows / costs.num_rows)
    expected_s = (decode_ns + costs.prefill_token_ns * num_prompt_tokens) / 1e9
    return max(STUCK_S, STUCK_FACTOR * expected_s)
