"""The shards as the router sees them: watched while they compute, replaced if they are lost."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from text_generation_router.client.ranks import ShardInfo, WarmupResult
from text_generation_router.client.shards import ShardedClient
from text_generation_router.config import RouterConfig
from text_generation_router.errors import GenerationError, UnhealthyError
from text_generation_router.scheduler.costs import UNMEASURED_S, StepDeadlines
from text_generation_router.scheduler.step import (
    CachedBatch,
    GoneShardError,
    GrammarResult,
    LostStepError,
    NoShardsError,
    Plan,
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
# How often the socket is checked for a replacement.
POLL_S = 0.02
# A shard whose socket is still the old one after this has not ended: the launcher must end it.
GRACE_S = 1.0

_Answer = TypeVar("_Answer")

logger = logging.getLogger(__name__)


_Send = Callable[[ShardedClient], Coroutine[Any, Any, _Answer]]
Connect = Callable[[Callable[[str], None]], Awaitable[ShardedClient]]
# Makes a span of a step: its context, and what is called when the step is done.
Trace = Callable[[Plan], tuple[str, Callable[[asyncio.Future[StepResult]], None]]]


@dataclass(slots=True, eq=False)
class _Call:
    """A call in flight."""

    # When the shards could begin with it, in the loop's time.
    since: float
    allowed_s: float


class WatchedShards:
    """Owns the connection to the present shards, and connects to those that replace them.

    Every call is a task, sent after one turn of the event loop, and ends within its deadline; its
    time begins when the calls before it have ended. While a step takes long, the shards are asked
    for their health, which they answer while they compute; silent shards are declared lost before
    the deadline. While this process is stopped no time passes: the shards may be stopped with it.

    When the shards are lost all calls in flight fail with LostStepError, and so do later calls
    until new shards are connected; only `compile_grammar` waits for them. Rows, KV and grammars are
    gone then. Where none will come, `verdict` says why, and the process should end, so that its
    supervisor restarts everything.
    """

    def __init__(
        self,
        shards: ShardedClient,
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
        self._shards: ShardedClient | None = None
        self._connection = shards
        self._deadlines = deadlines or StepDeadlines(UNMEASURED_S)
        self._connect = connect
        self._note_restart = note_restart
        self._trace = trace
        # Those with a deadline, oldest first.
        self._calls: list[_Call] = []
        self._is_settled = asyncio.Event()
        # All that is under way with the present shards, or the wait for new ones.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._serve_with(shards)

    @property
    def is_down(self) -> bool:
        """Whether no shards are connected."""
        return self._shards is None

    # ---- Calls ----

    def step(
        self, plan: Plan, batch_id: int, cached_batch_id: int | None = None
    ) -> asyncio.Task[StepResult]:
        """See `ShardedClient.step`."""
        context, end = ("", None) if self._trace is None else self._trace(plan)
        call = self._call(
            lambda shards: shards.step(plan, batch_id, cached_batch_id, context),
            self._deadlines.of(sum(plan.chunks.values())),
        )
        if end is not None:
            call.add_done_callback(end)
        return call

    def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> asyncio.Task[CachedBatch]:
        """See `ShardedClient.filter_batch`."""
        return self._call(
            lambda shards: shards.filter_batch(batch_id, request_ids), self._deadlines.of(0)
        )

    def clear_cache(self, batch_id: int | None) -> asyncio.Task[None]:
        """See `ShardedClient.clear_cache`."""
        return self._call(lambda shards: shards.clear_cache(batch_id), self._deadlines.of(0))

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        """See `ShardedClient.compile_grammar`. It waits for shards first, which does not count in
        `timeout_s`; raises UnhealthyError if none will come."""
        while True:
            try:
                await self.wait()
                return await self._call(lambda shards: shards.compile_grammar(grammar, timeout_s))
            except NoShardsError as error:
                raise UnhealthyError from error
            except GoneShardError:
                # The end of the caller may meet that of the shards.
                if (caller := asyncio.current_task()) is not None and caller.cancelling():
                    raise asyncio.CancelledError from None
                if self._connect is None:
                    raise

    def health(self) -> asyncio.Task[None]:
        """See `ShardedClient.health`."""
        return self._call(lambda shards: shards.health())

    def _call(self, send: _Send[_Answer], allowed_s: float | None = None) -> asyncio.Task[_Answer]:
        """Sends a message, if shards are connected. None: the answer has no deadline."""
        if (shards := self._shards) is None:
            return self._begin(self._refuse())
        return self._begin(self._answer(shards, send(shards), allowed_s))

    async def _refuse(self) -> Any:
        raise GoneShardError(*self.error.args)

    async def _answer(
        self, shards: ShardedClient, answer: Awaitable[_Answer], allowed_s: float | None
    ) -> _Answer:
        now = asyncio.get_running_loop().time
        call = _Call(now(), allowed_s or 0.0)
        if allowed_s is not None:
            self._calls.append(call)
        try:
            return await answer
        except (GenerationError, asyncio.CancelledError) as error:
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

    async def _watch(self, shards: ShardedClient) -> None:
        """Declares these shards lost if the oldest call has passed its deadline, and asks for their
        health if it takes long. While there are no calls it notices that a shard has ended."""
        time = asyncio.get_running_loop().time
        looked, next_question = time(), 0.0
        question: asyncio.Task[str] | None = None
        asked: _Call | None = None
        while self._shards is shards:
            await asyncio.sleep(LOOK_S)
            now = time()
            if (late_s := now - looked - LOOK_S) > STILL_S:
                for call in self._calls:
                    # A call that began after the last check may have begun before the pause, too.
                    is_older = call.since <= looked
                    call.since = call.since + late_s if is_older else max(call.since, now - LOOK_S)
                next_question = now + PATIENCE_S
            looked = now
            oldest = self._calls[0] if self._calls else None
            lasted_s = 0.0 if oldest is None else now - oldest.since
            if question is not None and question.done():
                detail, question = question.result(), None
                if asked is not None:
                    next_question = now + PATIENCE_S
                if detail and oldest is not None and oldest is asked:
                    self._declare_lost(f"The shards have not answered for {lasted_s:.0f} s", detail)
            elif oldest is not None and lasted_s > oldest.allowed_s:
                self._declare_lost(
                    f"The shards have not finished a step within {oldest.allowed_s:.3g} s"
                )
            elif question is not None or now < next_question:
                continue
            elif oldest is not None and lasted_s > PATIENCE_S:
                asked, question = oldest, self._begin(silence_of(shards))
            elif oldest is None and self._connect is not None and shards.may_be_gone:
                asked, question = None, self._begin(silence_of(self, 1))

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
        self._shards = self._connect = None
        self._is_settled.set()
        self._end_tasks()
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
        self._end_tasks()
        if self._connect is None:
            self.verdict = error
            self._begin(self._connection.close())
            return
        logger.warning("The shards are lost; waiting for new ones: %s", error)
        self.num_losses += 1
        self._is_settled.clear()
        self._begin(self._replace(self._connect))
        self.on_loss()

    def _serve_with(self, shards: ShardedClient) -> None:
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

    def _end_tasks(self) -> None:
        """Ends what is under way, once it has begun: Python warns of coroutines that never do."""
        for task in self._tasks:
            asyncio.get_running_loop().call_soon(task.cancel)

    def _begin(self, work: Coroutine[Any, Any, _Answer]) -> asyncio.Task[_Answer]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def silence_of(
    shards: ShardedClient | WatchedShards, num_questions: int = NUM_QUESTIONS
) -> str:
    """The last error, if none of the health checks is answered; else an empty string."""
    why = ""
    for _ in range(num_questions):
        try:
            async with asyncio.timeout(ANSWER_S):
                await shards.health()
        except Exception as error:
            # Any failure counts: no code awaits the watch, and an exception here would end it, so
            # that requests could wait for ever.
            why = str(error) or type(error).__name__
            logger.warning("The shards are silent: %s", why)
        else:
            return ""
    return why


class Reconnection:
    """Knows the socket of the last shards: new ones have another one at the same path.

    The shards that it returns serve the same model within the same limits, and are warm.
    """

    def __init__(self, config: RouterConfig, info: ShardInfo, warmup: WarmupResult) -> None:
        """`info` and `warmup` are the answers of the first shards."""
        self._path = config.master_shard_uds_path
        self._config = config
        self._info = info
        self._warmup = warmup
        self._last = _identity(self._path)

    async def __call__(self, report: Callable[[str], None]) -> ShardedClient:
        """Waits for new shards. Calls `report` with a sentence while the old ones have not ended.
        Raises GenerationError if the new shards differ from the lost ones, or refuse the same
        limits."""
        while True:
            await self._other_socket(report)
            attempt = asyncio.ensure_future(self._connect())
            try:
                # With another socket again, those that it waits for have ended.
                while not attempt.done() and _identity(self._path) == self._last:
                    await asyncio.wait({attempt}, timeout=POLL_S)
                if attempt.done():
                    return attempt.result()
            except LostStepError as error:
                logger.warning("The new shards are lost, too: %s", error)
            finally:
                attempt.cancel()
                await asyncio.gather(attempt, return_exceptions=True)

    async def _other_socket(self, report: Callable[[str], None]) -> None:
        """Returns when there is a new socket. Until then it calls `report` repeatedly: the launcher
        may not be able to end the shards yet."""
        loop = asyncio.get_running_loop()
        patience_ends = loop.time() + GRACE_S
        while (found := _identity(self._path)) is None or found == self._last:
            if found and loop.time() > patience_ends:
                report("The shards do not answer, and have not ended")
                patience_ends = loop.time() + GRACE_S
            await asyncio.sleep(POLL_S)
        self._last = found

    async def _connect(self) -> ShardedClient:
        try:
            shards = await ShardedClient.connect(
                self._path, answer_s=self._config.starting_deadline_s
            )
        except GenerationError as error:
            # Some may have failed before they listened; the launcher starts new ones.
            raise LostStepError(*error.args) from error
        warm_up = asyncio.create_task(self._warm_up(shards))
        try:
            while not (await asyncio.wait({warm_up}, timeout=PATIENCE_S))[0]:
                if silence := await silence_of(shards):
                    raise LostStepError(silence)
            await warm_up
        except BaseException:
            warm_up.cancel()
            await asyncio.gather(warm_up, return_exceptions=True)
            await shards.close()
            raise
        return shards

    async def _warm_up(self, shards: ShardedClient) -> None:
        await shards.clear_cache(None)
        info = await shards.info()
        for name in {*ShardInfo.__slots__} - {"last_number", "spares_core"}:
            new, old = getattr(info, name), getattr(self._info, name)
            if new != old:
                raise GenerationError(f"they have {name} {new!r}, the old ones had {old!r}")
        warmup = await shards.warmup(
            max_prefill_tokens=self._config.max_batch_prefill_tokens,
            max_batch_size=self._config.batch_rows,
            max_input_tokens=self._warmup.max_input_tokens,
            max_total_tokens=self._warmup.max_total_tokens,
            max_batch_total_tokens=self._warmup.num_blocks * self._info.block_size,
            num_snapshots=self._warmup.num_snapshots,
        )
        for name, kind in (("num_blocks", "KV blocks"), ("num_snapshots", "snapshots of states")):
            new, old = getattr(warmup, name), getattr(self._warmup, name)
            if new != old:
                raise GenerationError(f"they have {new} {kind}, the old ones had {old}")


def _identity(path: str) -> tuple[int, int, int] | None:
    """The identity of the file at a path; None: there is none. An inode number alone is reused."""
    try:
        state = os.lstat(path)
    except OSError:
        return None
    return state.st_dev, state.st_ino, state.st_ctime_ns
