"""Shards that are lost and replaced while the router lives: one `Shards` for all of them.

The rows, the KV and the grammars of the lost shards are gone. Requests are not: the Batcher waits
here until new shards are connected, and computes them again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from text_generation_router.errors import GenerationError, UnhealthyError
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.recovery import NoShardsError
from text_generation_router.scheduler.shards import (
    Advance,
    CachedBatch,
    GoneShardError,
    GrammarResult,
    LostStepError,
    Shards,
    StepResult,
)
from text_generation_router.scheduler.watch import WatchedShards

_Answer = TypeVar("_Answer")

logger = logging.getLogger(__name__)


class Connection(Shards, Protocol):
    """Shards with the connection to them."""

    async def gone(self) -> None:
        """Returns when one of them has ended."""
        ...

    async def close(self) -> None:
        """Closes the connection; calls in flight fail."""
        ...


Connect = Callable[[Callable[[str], None]], Awaitable[Connection]]


class ReplacedShards:
    """The present shards, and their replacements. A `Shards` and a `Replacement`.

    Without shards every call fails with GoneShardError, except `compile_grammar`, which waits. A
    failed call, the watch over it, or the end of the connection reports a loss. Owns the
    connections; `close` ends all its tasks.
    """

    def __init__(
        self,
        shards: Connection,
        watched: Callable[[Shards], WatchedShards],
        connect: Connect,
        note_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """`connect` waits for new shards, and calls its argument with a sentence while the old ones
        have not ended. If it raises GenerationError, no more shards are awaited."""
        self.num_losses = 0
        self.num_restarts = 0
        """How often new shards were connected."""
        self.verdict: str | None = None
        """Why no shards will come any more; None while they may."""
        self.detail = ""
        self.error = GenerationError("The shards are lost")
        self.on_loss: Callable[[], None] = lambda: None
        self.report_loss: Callable[[str], None] = lambda why: None
        """Called with a sentence where shards are declared lost that may still run: the launcher
        must end them."""
        self._watched = watched
        self._connect = connect
        self._note_restart = note_restart
        self._is_settled = asyncio.Event()
        self._current: WatchedShards | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._serve_with(shards)

    @property
    def is_down(self) -> bool:
        """Whether no shards are connected."""
        return self._current is None

    # ---- As `Replacement` ----

    async def is_lost_with(self, error: GenerationError) -> bool:
        """See Replacement. Shards that may still run are asked to free all rows."""
        current = self._current
        if current is None or isinstance(error, GoneShardError):
            return True
        if not isinstance(error, LostStepError):
            return False
        try:
            await current.clear_cache(None)
        except GenerationError:
            self._lose(current, error)
            return True
        return False

    async def wait(self) -> None:
        """See Replacement."""
        await self._is_settled.wait()
        if self.verdict is not None:
            raise NoShardsError(self.verdict, self.detail)

    # ---- As `Shards` ----

    async def prefill(
        self,
        batch_id: int,
        entries: Sequence[Entry],
        cached_batch_id: int | None,
        advance: Advance | None = None,
    ) -> StepResult:
        """See `Shards.prefill`."""
        asked = batch_id, entries, cached_batch_id, advance
        return await self._noticing(lambda shards: shards.prefill(*asked))

    async def decode(self, batch_ids: Sequence[int], advance: Advance) -> StepResult:
        """See `Shards.decode`."""
        return await self._noticing(lambda shards: shards.decode(batch_ids, advance))

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        """See `Shards.filter_batch`."""
        return await self._noticing(lambda shards: shards.filter_batch(batch_id, request_ids))

    async def clear_cache(self, batch_id: int | None) -> None:
        """See `Shards.clear_cache`."""
        await self._noticing(lambda shards: shards.clear_cache(batch_id))

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        """See `Shards.compile_grammar`. It waits for shards first, which does not count in
        `timeout_s`; raises UnhealthyError if none will come."""
        while True:
            try:
                await self.wait()
            except NoShardsError as error:
                raise UnhealthyError from error
            try:
                return await self._noticing(lambda at: at.compile_grammar(grammar, timeout_s))
            except GoneShardError:
                continue

    async def health(self) -> None:
        """See `Shards.health`."""
        await self._noticing(lambda shards: shards.health())

    # ---- Losses ----

    async def _noticing(self, call: Callable[[WatchedShards], Awaitable[_Answer]]) -> _Answer:
        """Calls the present shards; a failure may show that they are lost."""
        if (current := self._current) is None:
            raise GoneShardError(*self.error.args)
        try:
            return await call(current)
        except LostStepError as error:
            if not isinstance(error, GoneShardError) and current.verdict is None:
                raise
            self._lose(current, error)
            raise GoneShardError(*error.args) from error

    def _lose(self, current: WatchedShards, error: GenerationError) -> None:
        """Once for each connection: from now on no shards are connected."""
        if self._current is not current:
            return
        logger.warning("The shards are lost; waiting for new ones: %s", error)
        self.num_losses += 1
        self.error = GenerationError(*error.args)
        self._current = None
        self._is_settled.clear()
        if current.verdict is not None:
            self.report_loss(current.verdict)
        if self._notice is not asyncio.current_task():
            self._notice.cancel()
        self._begin(self._replace(self._connection))
        self.on_loss()

    def _serve_with(self, shards: Connection) -> None:
        self._connection = shards
        self._current = current = self._watched(shards)
        self._is_settled.set()
        self._notice = self._begin(self._notice_end(shards, current))

    async def _notice_end(self, shards: Connection, current: WatchedShards) -> None:
        try:
            await shards.gone()
        except Exception:
            # Failing calls will report the loss.
            logger.exception("The connection can not be watched; this is a bug in the router")
            return
        self._lose(current, GoneShardError("Could not connect to Text Generation server"))

    async def _replace(self, old: Connection) -> None:
        try:
            await old.close()
            shards = await self._connect(lambda why: self.report_loss(why))
        except Exception as error:
            if not isinstance(error, GenerationError):
                logger.exception("Waiting for new shards has failed; this is a bug in the router")
            logger.error("The shards can not be replaced: %s", error)
            self.verdict = f"The shards can not be replaced: {error}"
            self._is_settled.set()
            self.on_loss()
            return
        self.num_restarts += 1
        self._note_restart()
        logger.info("New shards have replaced the lost ones")
        self._serve_with(shards)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Ends all tasks and closes the connection."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connection.close()
