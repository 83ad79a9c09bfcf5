"""The shards as the scheduler sees them: watched while they compute, replaced if they are lost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from text_generation_router.errors import GenerationError, UnhealthyError
from text_generation_router.scheduler.deadline import UNMEASURED_S, StepDeadlines
from text_generation_router.scheduler.plan import Plan
from text_generation_router.scheduler.shards import (
    CachedBatch,
    GoneShardError,
    GrammarResult,
    LostStepError,
    NoShardsError,
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

_Answer = TypeVar("_Answer")
Connect = Callable[[Callable[[str], None]], Awaitable[Shards]]

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Call:
    """A call in flight."""

    # Without a time limit of its own: `_lose` sets it.
    scope: asyncio.Timeout
    # When the shards could begin with it, in the loop's time.
    since: float
    allowed_s: float


class WatchedShards:
    """Owns the connection to the present shards, and connects to those that replace them.

    Every call ends within its deadline; its time begins when the calls before it have ended. While
    a step takes long, the shards are asked for their health, which they answer while they compute;
    silent shards are declared lost before the deadline. While this process is stopped no time
    passes: the shards may be stopped with it.

    When the shards are lost all calls in flight fail with LostStepError, and so do later calls
    until new shards are connected; only `compile_grammar` waits for them. Rows, KV and grammars are
    gone then. Where none will come, `verdict` says why, and the process should end, so that its
    supervisor restarts everything.
    """

    def __init__(
        self,
        shards: Shards,
        deadlines: StepDeadlines | None = None,
        num_questions: int = NUM_QUESTIONS,
        connect: Connect | None = None,
        note_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """`connect` waits for new shards, and calls its argument with a sentence while the old ones
        have not ended. If it raises GenerationError, no more shards are awaited. Without it lost
        shards are not replaced, and their end is not noticed: the supervisor notices it."""
        self.verdict: str | None = None
        """Why no shards will come any more; None while they may."""
        self.detail = ""
        """The error of the last health check, which may name sockets; for the log."""
        self.num_losses = 0
        """How often shards were lost that can be replaced."""
        self.error: GenerationError = LostStepError("The shards are lost")
        """Why the last ones were lost."""
        self.on_loss: Callable[[], None] = lambda: None
        """Called at each loss, and when no shards will come."""
        self.report_loss: Callable[[str], None] = lambda why: None
        """Called with a sentence where shards are declared lost that may still run: the launcher
        must end them."""
        # None while none are connected.
        self._shards: Shards | None = shards
        self._connection = shards
        self._num_questions = num_questions
        self._deadlines = deadlines or StepDeadlines(UNMEASURED_S)
        self._connect = connect
        self._note_restart = note_restart
        # Oldest first.
        self._calls: list[_Call] = []
        self._timer: asyncio.TimerHandle | None = None
        self._looked = 0.0
        self._question: asyncio.Task[None] | None = None
        # Earliest time of the next health check, in the loop's time.
        self._next_question = 0.0
        self._is_settled = asyncio.Event()
        self._notice: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._serve_with(shards)

    @property
    def is_down(self) -> bool:
        """Whether no shards are connected."""
        return self._shards is None

    # ---- Calls ----

    async def step(
        self, plan: Plan, batch_id: int, cached_batch_id: int | None = None, trace_context: str = ""
    ) -> StepResult:
        """A Prefill if there are new rows, or else a Decode; see `Shards`."""
        shards, advance = self._present(), plan.advance
        if plan.admitted:
            entries = plan.admitted
            call = shards.prefill(batch_id, entries, cached_batch_id, advance, trace_context)
        else:
            assert advance is not None, "a step without newcomers has rows"
            call = shards.decode([batch_id], advance, trace_context)
        return await self._watched(call, sum(plan.chunks.values()))

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        """See `Shards.filter_batch`."""
        return await self._watched(self._present().filter_batch(batch_id, request_ids))

    async def clear_cache(self, batch_id: int | None) -> None:
        """See `Shards.clear_cache`."""
        await self._watched(self._present().clear_cache(batch_id))

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        """See `Shards.compile_grammar`. It waits for shards first, which does not count in
        `timeout_s`; raises UnhealthyError if none will come."""
        while True:
            try:
                await self.wait()
            except NoShardsError as error:
                raise UnhealthyError from error
            shards = self._present()
            try:
                return await shards.compile_grammar(grammar, timeout_s)
            except GoneShardError as error:
                if not self._notice_loss(shards, error):
                    raise

    async def health(self) -> None:
        """See `Shards.health`."""
        shards = self._present()
        try:
            await shards.health()
        except GoneShardError as error:
            self._notice_loss(shards, error)
            raise

    def _present(self) -> Shards:
        if self._shards is None:
            raise GoneShardError(*self.error.args)
        return self._shards

    async def _watched(self, call: Awaitable[_Answer], num_prompt_tokens: int = 0) -> _Answer:
        loop, shards = asyncio.get_running_loop(), self._present()
        scope = asyncio.timeout(None)
        own = _Call(scope, loop.time(), self._deadlines.of(num_prompt_tokens))
        try:
            async with scope:
                self._calls.append(own)
                if self._timer is None:
                    self._looked = own.since
                    self._timer = loop.call_later(LOOK_S, self._look)
                return await call
        except GoneShardError as error:
            self._end(own)
            self._notice_loss(shards, error)
            raise
        except SilentShardError as error:
            self._end(own)
            self._declare_lost(str(error))
            raise
        except TimeoutError:
            if shards is not self._shards:
                raise GoneShardError(*self.error.args) from None
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

    # ---- The watch ----

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
            self._question = loop.create_task(self._ask(self._present(), oldest))
        self._timer = loop.call_later(LOOK_S, self._look)

    async def _ask(self, shards: Shards, call: _Call) -> None:
        self.detail = await silence_of(shards, self._num_questions)
        self._question = None
        loop = asyncio.get_running_loop()
        self._next_question = loop.time() + PATIENCE_S
        if self.detail and call in self._calls:
            lasted_s = loop.time() - call.since
            self._declare_lost(f"The shards have not answered for {lasted_s:.0f} s")

    # ---- Losses ----

    async def is_lost_with(self, error: GenerationError) -> bool:
        """Whether the shards are lost and will be replaced, after a call failed with `error`.
        Shards that may still run are asked to free all rows."""
        if self._connect is None:
            return False
        if self.is_down or isinstance(error, GoneShardError):
            return True
        if not isinstance(error, LostStepError):
            return False
        try:
            await self.clear_cache(None)
        except GenerationError as failure:
            if not self.is_down:
                self._lose(failure)
            return True
        return False

    async def wait(self) -> None:
        """Returns when shards are connected; raises NoShardsError if none will come."""
        await self._is_settled.wait()
        if self.verdict is not None:
            raise NoShardsError(self.verdict, self.detail)

    async def close(self) -> None:
        """Ends all tasks and closes the connection. Nothing can be called any more."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connection.close()

    def _declare_lost(self, why: str) -> None:
        """They do not answer, but may still run."""
        if not self.is_down:
            self.report_loss(why)
            self._lose(GenerationError(why, self.detail))

    def _notice_loss(self, shards: Shards, error: GenerationError) -> bool:
        """They have ended. Returns whether they are replaced."""
        if self._connect is not None and self._shards is shards:
            self._lose(error)
        return self._connect is not None

    def _lose(self, error: GenerationError) -> None:
        """Once for each connection: all calls in flight end, and from now on none is connected."""
        self.error, self._shards = error, None
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            call.scope.reschedule(now)
        if self._question is not None:
            self._question.cancel()
            self._question = None
        if self._connect is None:
            self.verdict, self.detail = error.args
            return
        logger.warning("The shards are lost; waiting for new ones: %s", error)
        self.num_losses += 1
        self._is_settled.clear()
        if self._notice is not None and self._notice is not asyncio.current_task():
            self._notice.cancel()
        self._begin(self._replace(self._connect))
        self.on_loss()

    def _serve_with(self, shards: Shards) -> None:
        self._connection = self._shards = shards
        self.detail, self._next_question = "", 0.0
        self._is_settled.set()
        if self._connect is not None:
            self._notice = self._begin(self._notice_end(shards))

    async def _notice_end(self, shards: Shards) -> None:
        try:
            await shards.gone()
        except Exception:
            # Failing calls will report the loss.
            logger.exception("The connection can not be watched; this is a bug in the router")
            return
        error = GoneShardError("Could not connect to Text Generation server")
        self._notice_loss(shards, error)

    async def _replace(self, connect: Connect) -> None:
        try:
            await self._connection.close()
            shards = await connect(lambda why: self.report_loss(why))
        except Exception as error:
            if not isinstance(error, GenerationError):
                logger.exception("Waiting for new shards has failed; this is a bug in the router")
            logger.error("The shards can not be replaced: %s", error)
            self.verdict, self.detail = f"The shards can not be replaced: {error}", ""
            self._is_settled.set()
            self.on_loss()
            return
        self._note_restart()
        logger.info("New shards have replaced the lost ones")
        self._serve_with(shards)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def silence_of(shards: Shards, num_questions: int) -> str:
    """The last error, if none of up to `num_questions` health checks is answered; else an empty
    string."""
    why = ""
    for _ in range(num_questions):
        try:
            async with asyncio.timeout(ANSWER_S):
                await shards.health()
        except Exception as error:
            # Any failure counts: no code awaits the watch, and an exception here would end it, so
            # that requests could wait for ever.
            why = str(error) or type(error).__name__
            logger.warning("A call takes long, and the shards are silent: %s", why)
        else:
            return ""
    return why
