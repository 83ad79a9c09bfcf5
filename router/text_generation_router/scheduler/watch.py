"""The shards as the scheduler sees them: watched while they compute, replaced if they are lost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from text_generation_process.defaults import (
    CONTEXT_UNIT,
    LEAST_STEP_DEADLINE_ON_GPU_S,
    LEAST_STEP_DEADLINE_S,
    STEP_DEADLINE_FACTOR,
)

from text_generation_router.errors import GenerationError, UnhealthyError
from text_generation_router.scheduler.plan import Plan, SchedulerLimits
from text_generation_router.scheduler.shards import (
    CachedBatch,
    GoneShardError,
    GrammarResult,
    LostStepError,
    NoShardsError,
    SilentShardError,
    StepResult,
)

# How often the oldest call is checked, and whether a shard may have ended.
LOOK_S = 0.25
# A check this late means that this process, or the whole machine, was stopped.
STILL_S = 1.0
# While a call takes longer than this, the shards are asked for their health at this interval.
PATIENCE_S = 5.0
# Healthy shards answer within this. They are declared lost after NUM_QUESTIONS in a row without an
# answer: after a pause of the whole machine the first answer may be late, and of several shards the
# others report the one that hangs, with more detail: they come first. It is a little longer than
# the timeout of the client, which names the silent rank.
ANSWER_S = 5.0
NUM_QUESTIONS = 4
# How long a step may take where warm-up could measure nothing.
UNMEASURED_S = 300.0
# Ranks notice a missing rank first: they know which one it is.
BEHIND_RANKS_S = 1.0

_Answer = TypeVar("_Answer")

logger = logging.getLogger(__name__)


class Shards(Protocol):
    """The connection to all shards of the model. Every call raises GenerationError when a shard
    fails, and LostStepError when the shard may still have computed something.

    One step or `filter_batch` is in flight at a time. Only a Decode with `is_ahead` may follow
    another Decode in flight, and is computed after it.
    """

    @property
    def may_be_gone(self) -> bool:
        """Whether a shard may have ended since the last call, which `health` would find out."""
        ...

    def step(
        self,
        plan: Plan,
        batch_id: int,
        cached_batch_id: int | None = None,
        trace_context: str = "",
    ) -> Awaitable[StepResult]:
        """Prefill, if there are new rows: computes their first `chunk_len` uncached tokens;
        complete ones get a token. With `cached_batch_id` they join that batch, which keeps its id.
        Its rows go on in the same pass, before the new ones, which can share the blocks written
        there. If it fails, the cached batch is unchanged and the new rows are
        free. Otherwise Decode: advances every row of the batch `batch_id`.

        The message is on its way after one turn of the event loop. `trace_context`: the span above
        those of the shards; empty: they have none.
        """
        ...

    def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> Awaitable[CachedBatch]:
        """Keeps the rows of `request_ids` (not empty) and frees the others."""
        ...

    def clear_cache(self, batch_id: int | None) -> Awaitable[None]:
        """Frees the rows of one batch, or of all; an unknown id is no error."""
        ...

    def compile_grammar(self, grammar: str, timeout_s: float) -> Awaitable[GrammarResult]:
        """Compiles a grammar in llguidance's form, while steps run. Raises TimeoutError."""
        ...

    def health(self) -> Awaitable[None]:
        """Returns if every shard is healthy."""
        ...

    async def close(self) -> None:
        """Closes the connection; calls in flight fail. May be repeated."""
        ...


Connect = Callable[[Callable[[str], None]], Awaitable[Shards]]
# Sends a step, with a trace context.
Send = Callable[[str], Coroutine[Any, Any, StepResult]]
# Makes a span of a step, and sends the step with it.
Trace = Callable[[Plan, Send], Coroutine[Any, Any, StepResult]]


@dataclass(frozen=True, slots=True)
class StepDeadlines:
    """The longest time of a step, by what it carries.

    By default that is the larger of `LEAST_STEP_DEADLINE_S` and `STEP_DEADLINE_FACTOR` times what
    warm-up has measured for the largest step with as many prompt tokens: they are at the end of the
    longest context, and all rows decode there. Nothing in a step takes longer:

    - It is an upper bound of the work. The factor covers what warm-up has not measured
      (log-probabilities of prompts, grammars, rows that are computed again because memory was
      short) and a slower machine.
    - One-time work is not part of a step. Warm-up is not watched. On a CPU the kernels are
      compiled, or loaded, before a shard listens, and warm-up samples in every way. On a GPU the
      first steps do more: therefore `LEAST_STEP_DEADLINE_ON_GPU_S`.
    """

    # The same for every step where it is all there is, as with --step-deadline.
    least_s: float
    decode_s: float = 0.0
    token_s: float = 0.0

    @classmethod
    def measured(cls, limits: SchedulerLimits, longest: int, is_on_gpu: bool) -> "StepDeadlines":
        """For rows of up to `longest` tokens."""
        costs, num_rows = limits.costs, limits.max_batch_size
        if not costs.decode_step_ns:
            return cls(UNMEASURED_S)
        token_ns = costs.prefill_token_ns + costs.prefill_context_ns * longest / CONTEXT_UNIT
        decode_ns = costs.decode_step_ns * max(1.0, num_rows / costs.num_rows)
        decode_ns += num_rows * (1 + limits.speculate) * token_ns
        factor = STEP_DEADLINE_FACTOR
        least_s = LEAST_STEP_DEADLINE_ON_GPU_S if is_on_gpu else LEAST_STEP_DEADLINE_S
        return cls(least_s, factor * decode_ns / 1e9, factor * token_ns / 1e9)

    def behind_ranks(self, ranks_s: float) -> "StepDeadlines":
        """The same, but longer than ranks wait for one another."""
        return replace(self, least_s=max(self.least_s, ranks_s + BEHIND_RANKS_S))

    def work_s(self, num_prompt_tokens: int) -> float:
        """The expected time of such a step, without the factor."""
        return (self.decode_s + num_prompt_tokens * self.token_s) / STEP_DEADLINE_FACTOR

    def of(self, num_prompt_tokens: int) -> float:
        """Seconds for a step with that number of prompt tokens."""
        return max(self.least_s, self.decode_s + num_prompt_tokens * self.token_s)


@dataclass(slots=True, eq=False)
class _Call:
    """A call in flight."""

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
        connect: Connect | None = None,
        note_restart: Callable[[], None] = lambda: None,
        trace: Trace | None = None,
    ) -> None:
        """`connect` waits for new shards, and calls its argument with a sentence while the old ones
        have not ended. If it raises GenerationError, no more shards are awaited. Without it lost
        shards are not replaced, and their end is not noticed: the supervisor notices it."""
        self.verdict: GenerationError | None = None
        """Why no shards will come any more; None while they may."""
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
        self._shards: Shards | None = None
        self._connection = shards
        self._deadlines = deadlines or StepDeadlines(UNMEASURED_S)
        self._connect = connect
        self._note_restart = note_restart
        self._trace = trace
        # Oldest first.
        self._calls: list[_Call] = []
        self._question: asyncio.Task[str] | None = None
        self._is_settled = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._serve_with(shards)

    @property
    def is_down(self) -> bool:
        """Whether no shards are connected."""
        return self._shards is None

    # ---- Calls ----

    def step(
        self, plan: Plan, batch_id: int, cached_batch_id: int | None = None
    ) -> Coroutine[Any, Any, StepResult]:
        """See `Shards.step`. It never raises before it is awaited."""

        def send(trace_context: str) -> Coroutine[Any, Any, StepResult]:
            return self._call(
                lambda shards: shards.step(plan, batch_id, cached_batch_id, trace_context),
                self._deadlines.of(sum(plan.chunks.values())),
            )

        return send("") if self._trace is None else self._trace(plan, send)

    def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> Awaitable[CachedBatch]:
        """See `Shards.filter_batch`."""
        return self._call(
            lambda shards: shards.filter_batch(batch_id, request_ids), self._deadlines.of(0)
        )

    def clear_cache(self, batch_id: int | None) -> Awaitable[None]:
        """See `Shards.clear_cache`."""
        return self._call(lambda shards: shards.clear_cache(batch_id), self._deadlines.of(0))

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        """See `Shards.compile_grammar`. It waits for shards first, which does not count in
        `timeout_s`; raises UnhealthyError if none will come."""
        while True:
            try:
                await self.wait()
                return await self._call(lambda shards: shards.compile_grammar(grammar, timeout_s))
            except NoShardsError as error:
                raise UnhealthyError from error
            except GoneShardError:
                if self._connect is None:
                    raise

    def health(self) -> Awaitable[None]:
        """See `Shards.health`."""
        return self._call(lambda shards: shards.health())

    def _call(
        self, send: Callable[[Shards], Awaitable[_Answer]], allowed_s: float | None = None
    ) -> Coroutine[Any, Any, _Answer]:
        """Sends a message now, if shards are connected. None: the answer has no deadline."""
        if (shards := self._shards) is None:
            return self._refuse()
        return self._answer(shards, send(shards), allowed_s)

    async def _refuse(self) -> Any:
        raise GoneShardError(*self.error.args)

    async def _answer(
        self, shards: Shards, answer: Awaitable[_Answer], allowed_s: float | None
    ) -> _Answer:
        now = asyncio.get_running_loop().time
        call = _Call(now(), allowed_s or 0.0)
        if allowed_s is not None:
            self._calls.append(call)
        try:
            return await answer
        except GenerationError as error:
            if self._shards is shards:
                if isinstance(error, SilentShardError):
                    self._declare_lost(str(error))
                elif isinstance(error, GoneShardError) and self._connect is not None:
                    self._lose(error)
                else:
                    raise
            raise GoneShardError(*self.error.args) from error
        finally:
            if allowed_s is not None:
                is_oldest = self._calls[0] is call
                self._calls.remove(call)
                if is_oldest and self._calls:
                    self._calls[0].since = now()

    # ---- The watch ----

    async def _watch(self, shards: Shards) -> None:
        """Declares these shards lost if the oldest call has passed its deadline, and asks for their
        health if it takes long. While there are no calls it notices that a shard has ended."""
        time = asyncio.get_running_loop().time
        looked, next_question = time(), 0.0
        asked: _Call | None = None
        while True:
            await asyncio.sleep(LOOK_S)
            if self._shards is not shards:
                return
            now = time()
            if (late_s := now - looked - LOOK_S) > STILL_S:
                for call in self._calls:
                    # A call that began after the last check may have begun before the pause, too.
                    is_older = call.since <= looked
                    call.since = call.since + late_s if is_older else max(call.since, now - LOOK_S)
                next_question = now + PATIENCE_S
            looked = now
            oldest = self._calls[0] if self._calls else None
            if self._question is not None and self._question.done():
                detail, self._question = self._question.result(), None
                next_question = now + PATIENCE_S
                if detail and oldest is not None and oldest is asked:
                    lasted_s = now - oldest.since
                    self._declare_lost(f"The shards have not answered for {lasted_s:.0f} s", detail)
            elif oldest is None:
                if self._connect is not None and shards.may_be_gone:
                    with suppress(Exception):  # an end is noted, and nothing may end the watch
                        await self.health()
                    looked = time()
            elif now - oldest.since > oldest.allowed_s:
                self._declare_lost(
                    f"The shards have not finished a step within {oldest.allowed_s:.3g} s"
                )
            elif now - oldest.since > PATIENCE_S and not self._question and now >= next_question:
                asked = oldest
                self._question = self._begin(silence_of(shards))

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
            raise NoShardsError(*self.verdict.args)

    async def close(self) -> None:
        """Ends all tasks and closes the connection. Nothing can be called any more."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connection.close()

    def _declare_lost(self, why: str, detail: str = "") -> None:
        """They do not answer, but may still run. `detail`: for the log, may name sockets."""
        if not self.is_down:
            self.report_loss(why)
            self._lose(GenerationError(why, detail))

    def _lose(self, error: GenerationError) -> None:
        """Once for each connection, which is closed: all calls in flight fail."""
        self.error, self._shards = error, None
        if self._question is not None:
            self._question.cancel()
            self._question = None
        if self._connect is None:
            self.verdict = error
            self._begin(self._connection.close())
            return
        logger.warning("The shards are lost; waiting for new ones: %s", error)
        self.num_losses += 1
        self._is_settled.clear()
        self._begin(self._replace(self._connect))
        self.on_loss()

    def _serve_with(self, shards: Shards) -> None:
        self._connection = self._shards = shards
        self._is_settled.set()
        self._begin(self._watch(shards))

    async def _replace(self, connect: Connect) -> None:
        try:
            await self._connection.close()
            shards = await connect(lambda why: self.report_loss(why))
        except Exception as error:
            if not isinstance(error, GenerationError):
                logger.exception("Waiting for new shards has failed; this is a bug in the router")
            logger.error("The shards can not be replaced: %s", error)
            self.verdict = GenerationError(f"The shards can not be replaced: {error}")
            self._is_settled.set()
            self.on_loss()
            return
        self._note_restart()
        logger.info("New shards have replaced the lost ones")
        self._serve_with(shards)

    def _begin(self, work: Coroutine[Any, Any, _Answer]) -> asyncio.Task[_Answer]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def silence_of(shards: Shards) -> str:
    """The last error, if none of NUM_QUESTIONS health checks is answered; else an empty string."""
    why = ""
    for _ in range(NUM_QUESTIONS):
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
