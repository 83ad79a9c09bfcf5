"""Continuous batching: the loop that sends steps to the shards.

One task, `Batcher.run`, drives the shards. The next step is launched before the text of the last
one is made, so that the router works while the shards compute. Where the shards leave the router a
core and the next step does not depend on the result of the last one, it is launched shortly before
that result, and the shards have no pause between the two. Therefore what only the router sees (a
stop string, a client that left) takes effect one or two steps late, and what was computed meanwhile
is dropped.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from text_generation_router.errors import (
    GenerationError,
    IncompleteGenerationError,
    RouterError,
    ShuttingDownError,
    UnhealthyError,
    ValidationError,
)
from text_generation_router.metrics import Metrics
from text_generation_router.request import Request
from text_generation_router.scheduler.costs import EndingRate, SchedulerLimits
from text_generation_router.scheduler.entry import Entry, EntryState
from text_generation_router.scheduler.planner import Planner
from text_generation_router.scheduler.step import (
    CachedBatch,
    Delivery,
    LostStepError,
    Method,
    NoShardsError,
    Plan,
    Shards,
    StepResult,
)
from text_generation_router.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# How long before the expected result of a step the next one is launched, if it can be: the time
# that a result and a call need on their way where all cores compute. It is no longer, because
# requests that arrive after the launch wait for one more step.
AHEAD_S = 0.008
# How long a step that succeeded proves that the shards work.
FRESH_S = 1.0
# A request that ran at this many losses of the shards may be their cause: it is not computed again.
MOST_LOSSES = 3


@dataclass(frozen=True, slots=True)
class _Step:
    """A Prefill or Decode in flight."""

    plan: Plan
    batch_id: int
    call: asyncio.Task[StepResult]
    launched: float
    method: Method


class Batcher:
    """Owns the Planner (queue and blocks) and every Entry.

    `submit` and `cancel` may be called at any time from the event loop. Every submitted entry ends
    in exactly one of finished, failed, cancelled.
    """

    def __init__(
        self,
        shards: Shards,
        tokenizer: Tokenizer,
        metrics: Metrics,
        limits: SchedulerLimits,
        resumes_streams: bool = True,
        most_losses: int = MOST_LOSSES,
    ) -> None:
        """Entries are computed again by shards that replace lost ones; but those that ran at
        `most_losses` losses end, and without `resumes_streams` the streams that have begun."""
        self._shards = shards
        self._resumes_streams = resumes_streams
        self._most_losses = most_losses
        self._num_losses = 0
        self._tokenizer = tokenizer
        self._entry_ids = count()
        self._batch_ids = count()
        self.planner = Planner(limits)
        """Queue, rows and blocks; only the Batcher changes them."""
        # The shards' receipt for the rows that exist; None when there are none.
        self._batch: CachedBatch | None = None
        # A step that is done and recorded, but not delivered.
        self._reply: tuple[_Step, StepResult] | None = None
        # Every entry that has not ended.
        self._live: dict[int, Entry] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        # The calls in flight, and the step that was launched behind the one that `run` waits for.
        self._calls: set[asyncio.Task[StepResult]] = set()
        self._ahead: _Step | None = None
        # How long the last decode took.
        self._decode_s = 0.0
        self._is_healthy = True
        self.failure: str | None = None
        """Why `run` has failed, in one sentence: the process must end."""
        # When the last step came back.
        self._last_success = -math.inf
        # When the first request came to an idle scheduler.
        self._waiting_since = -math.inf
        # Set when no more entries are taken, for ever: the error of new requests.
        self._refusal: Callable[[], RouterError] | None = None
        self._metrics = metrics
        self._delivery = Delivery(metrics, self._end)
        # How fast waiting entries are admitted, since the queue was last empty.
        self._admissions = EndingRate()
        shards.on_loss = self._work.set
        _show(self.planner, limits.block_size, metrics)

    # ---- Called by clients, between the steps of `run` ----

    def submit_many(
        self,
        requests: Sequence[Request],
        arrival: float | None = None,
        charge: Callable[[int, float], None] | None = None,
    ) -> list[Entry]:
        """Queues requests for the same prompt, which is computed once and shared. `arrival` and
        `charge` are those of `Entry`.

        Only the first, which computes it, may ask for the prompt's log-probabilities. Raises
        ValidationError if one of them can never fit the KV blocks, ShuttingDownError and
        UnhealthyError.
        """
        if self._refusal is not None:
            raise self._refusal()
        for request in requests:
            assert request.input_ids == requests[0].input_ids, "another prompt can share nothing"
            self._check_fits(request)
        assert not any(request.prefill_logprobs for request in requests[1:]), "only the first"
        ids = [next(self._entry_ids) for _ in requests]
        group = ids[0] if len(ids) > 1 else None
        entries = [
            Entry(entry_id, request, self._tokenizer, group, arrival, charge)
            for entry_id, request in zip(ids, requests, strict=True)
        ]
        if not self._live:
            self._waiting_since = time.perf_counter()
        if not self.planner.queue:
            self._admissions.begin(time.perf_counter())
        for entry in entries:
            self._live[entry.id] = entry
            self.planner.queue.append(entry)
        self._work.set()
        return entries

    def _check_fits(self, request: Request) -> None:
        num_tokens = len(request.input_ids) + request.max_new_tokens
        allocator = self.planner.blocks.allocator
        if allocator.num_blocks_for(num_tokens) > allocator.num_blocks:
            raise ValidationError(
                "`inputs` tokens + `max_new_tokens` must be <= "
                f"{allocator.num_blocks * allocator.block_size}, the size of the KV "
                f"cache. Given: {len(request.input_ids)} `inputs` tokens and "
                f"{request.max_new_tokens} `max_new_tokens`"
            )

    def cancel(self, entry: Entry, error: RouterError | None = None) -> None:
        """Ends an entry whose client has left, or with an error; does nothing if it has ended."""
        if entry.state is not EntryState.ENDED:
            self._end(entry, error or IncompleteGenerationError())

    def queue_retry_s(self) -> int:
        """In how many whole seconds the present queue will be admitted, at the last rate."""
        return self._admissions.retry_after_s(time.perf_counter(), len(self.planner.queue))

    @property
    def is_healthy(self) -> bool:
        """False from a failed step to the next success; False for ever once `run` is over."""
        return self._is_healthy and self._refusal is None

    @property
    def stalled_s(self) -> float:
        """Seconds since the last step ended, while there is work; 0 without work."""
        if not self._live:
            return 0.0
        return time.perf_counter() - max(self._last_success, self._waiting_since)

    async def probe(self) -> bool:
        """Asks the shards for their health; the answer becomes `is_healthy`.

        While steps succeed it does not ask: they are proof, and the answer would be late.
        """
        is_fresh = time.perf_counter() - self._last_success < FRESH_S
        if self._is_healthy and is_fresh and self.planner.running:
            return self.is_healthy
        try:
            await self._shards.health()
        except GenerationError as error:
            logger.warning("Health probe: %s", error)
            self._is_healthy = False
        else:
            self._is_healthy = True
        return self.is_healthy

    async def close(self) -> None:
        """Ends every entry, with what ended the shards or else IncompleteGenerationError. Waits
        until `run` has returned."""
        why = () if self._shards.verdict is None else self._shards.verdict.args
        self._stop(partial(GenerationError, *why) if why else IncompleteGenerationError)
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait({task})

    # ---- The loop ----

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs in the block, and ends every entry at its end."""
        run = asyncio.create_task(self.run(), name="batcher")
        try:
            yield
        finally:
            await self.close()
            await asyncio.gather(run, return_exceptions=True)

    async def run(self) -> None:
        """Computes what is submitted until `close`; the one task that sends steps to the shards."""
        self._task = asyncio.current_task()
        try:
            while self._refusal is None:
                step, self._ahead = self._ahead or await self._launch_next(), None
                await self._deliver_reply()
                if step is not None:
                    self._ahead = await self._launch_ahead(step)
                    self._reply = await self._receive(step)
                elif self._refusal is None and not self.planner.queue:
                    self._work.clear()
                    await self._work.wait()
        except asyncio.CancelledError:
            if self._refusal is None:
                raise
        except NoShardsError as error:
            why = error.args
            self._stop(lambda: GenerationError(*why), UnhealthyError)
        except Exception as error:
            logger.exception("The scheduler has failed; this is a bug in the router")
            self.failure = f"The scheduler has failed: {type(error).__name__}: {error}"
            self._stop(lambda: GenerationError("internal error"), UnhealthyError)
            raise
        finally:
            self._stop()
            for call in self._calls:
                call.cancel()
            self.planner.sweep()
            self._task = None

    async def _launch_next(self) -> _Step | None:
        """Chooses and launches a step; None when there is nothing to compute, or after `close`.

        No step is in flight here. Therefore blocks can be reused: the rows that held them are
        dropped before the next step is launched, which could write to them.
        """
        planner = self.planner
        while True:
            # Behind a loss the end of this task may have been taken for that of a call.
            if self._refusal is not None:
                return None
            await self._recover()
            planner.sweep()
            grown_blocks = planner.grow()
            if await self._drop_rows():
                break
        batch = self._batch
        plan = planner.plan(grown_blocks)
        if plan is None:
            return None
        if plan.admitted:
            self._note_admission(plan)
            batch_id = next(self._batch_ids)
        else:
            assert batch is not None, "it decodes rows"
            batch_id = batch.id
        step = self._launch(plan, batch_id, None if batch is None else batch.id)
        await asyncio.sleep(0)  # the message is sent before the text of the last step is made
        return step

    async def _launch_ahead(self, step: _Step) -> _Step | None:
        """Launches the step behind one that is almost done; None where that is not possible.

        No block is reused here: entries that end in `step` have no rows in the next one.
        """
        if not self.planner.is_unchanged(step.plan):
            return None
        began = max(step.launched, self._last_success)
        if (wait_s := began + self._decode_s - AHEAD_S - time.perf_counter()) > 0:
            await asyncio.wait({step.call}, timeout=wait_s)
        plan = None if step.call.done() else self.planner.plan_ahead(step.plan)
        return None if plan is None else self._launch(plan, step.batch_id, step.batch_id)

    def _launch(self, plan: Plan, batch_id: int, cached_id: int | None) -> _Step:
        call = self._shards.step(plan, batch_id, cached_id)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        method: Method = "prefill" if plan.admitted else "decode"
        self._metrics.batch_inference_count.inc(method=method)
        return _Step(plan, batch_id, call, time.perf_counter(), method)

    def _note_admission(self, plan: Plan) -> None:
        now = time.perf_counter()
        newcomers = [entry for entry in plan.admitted if entry.started is None]
        for entry in newcomers:
            entry.started, entry.cached_tokens = now, entry.num_cached_tokens
        self._admissions.end(now, len(newcomers))
        self._delivery.note_admission(plan, self.planner.reason)

    async def _receive(self, step: _Step) -> tuple[_Step, StepResult] | None:
        """Waits for a step and records it; None if it failed."""
        try:
            result = await step.call
            if not result.is_answer_to(step.plan.asked, step.plan.entries.keys()):
                raise LostStepError("Server error: the shard answered for other requests")
        except GenerationError as error:
            self._metrics.batch_inference_failure.inc(method=step.method)
            if self._ahead is not None:
                # Its result is of no use: it builds on the step that failed.
                self._metrics.batch_inference_failure.inc(method=self._ahead.method)
                await asyncio.gather(self._ahead.call, return_exceptions=True)
                self._ahead = None
            await self._fail_step(step, error)
            return None
        self._is_healthy = True
        began, self._last_success = max(step.launched, self._last_success), time.perf_counter()
        self._batch = result.batch
        self.planner.settle(step.plan, result)
        if self._ahead is not None and (ended := result.ended):
            self._ahead = replace(self._ahead, plan=self._ahead.plan.without(ended))
        if step.plan.entries and not step.plan.chunks:
            self._decode_s = (result.forward_ns + result.decode_ns) / 1e9
        self._delivery.note_step(step.method, self._last_success - began, result)
        return step, result

    async def _deliver_reply(self) -> None:
        """Delivers the last result, if it is not delivered yet."""
        if (reply := self._reply) is not None:
            step, result = reply
            await self._delivery.deliver(step.plan, result, step.method)
            self._reply = None

    # ---- Endings ----

    def _end(self, entry: Entry, error: RouterError | None = None) -> None:
        """Ends an entry, once. Its blocks, if any, are released when no step is in flight."""
        if entry.state is EntryState.ENDED:
            return
        if entry.state is EntryState.QUEUED:
            self.planner.queue.remove(entry)
        entry.state = EntryState.ENDED
        del self._live[entry.id]
        if error is not None:
            entry.fail(error)

    async def _recover(self) -> None:
        """If the shards were lost, waits for new ones, which compute the running entries again."""
        shards = self._shards
        while self._num_losses != shards.num_losses:
            await self._deliver_reply()
            self._batch, self._num_losses = None, shards.num_losses
            for entry in self.planner.lose_blocks():
                entry.num_losses += 1
                if entry.num_losses >= self._most_losses:
                    why = f"the shards ended {entry.num_losses} times while this request ran"
                    self._end(entry, GenerationError(f"{why}: it is not computed again"))
                elif entry.is_shown and entry.token_ids and not self._resumes_streams:
                    self._end(entry, GenerationError(*shards.error.args))
            await shards.wait()

    async def _drop_rows(self) -> bool:
        """Has the shards forget the rows of entries that no longer run; False if it fails, and with
        it all entries that run."""
        batch, running = self._batch, self.planner.running
        if batch is None or len(batch.request_ids) == len(running):
            return True
        started = time.perf_counter()
        try:
            if running:
                self._batch = await self._shards.filter_batch(batch.id, list(running))
            else:
                self._batch = None
                await self._shards.clear_cache(batch.id)
        except GenerationError as error:
            if await self._shards.is_lost_with(error):
                return False
            self._fail(batch.id, list(running.values()), error)
            self._batch = None
            await self._clear(batch.id)
            return False
        self._delivery.drop_s += time.perf_counter() - started
        return True

    async def _fail_step(self, step: _Step, error: GenerationError) -> None:
        """Ends the entries of a failed step: the new ones of a Prefill, or else all.

        A failed Prefill leaves the rows before it unchanged, except after LostStepError. Where the
        shards are lost no entry ends here: see `_recover`.
        """
        if await self._shards.is_lost_with(error):
            return
        entries = step.plan.admitted
        if not entries or isinstance(error, LostStepError):
            self._batch, entries = None, list(step.plan.entries.values())
        self.planner.is_closed = True
        self._fail(step.batch_id, entries, error)
        await self._clear(step.batch_id if self._batch is not None else None)

    def _fail(self, batch_id: int, entries: Iterable[Entry], error: GenerationError) -> None:
        logger.error("Batch %d failed: %s", batch_id, error)
        self._is_healthy = False
        for entry in entries:
            self.planner.release(entry)
            self._end(entry, GenerationError(*error.args))

    async def _clear(self, batch_id: int | None) -> None:
        try:
            await self._shards.clear_cache(batch_id)
        except GenerationError as clear_error:
            logger.warning("Rows could not be freed: %s", clear_error)

    def _stop(
        self,
        ending: Callable[[], RouterError] = IncompleteGenerationError,
        refusal: Callable[[], RouterError] = ShuttingDownError,
    ) -> None:
        """Ends every entry and refuses new ones. The first `refusal` stays."""
        self._refusal = self._refusal or refusal
        for entry in list(self._live.values()):
            self._end(entry, ending())


def _show(planner: Planner, block_size: int, metrics: Metrics) -> None:
    """Queue, rows and blocks are read when the page of metrics is rendered."""
    metrics.queue_size.read = lambda: len(planner.queue)
    metrics.batch_current_size.read = lambda: len(planner.running)
    metrics.batch_current_max_tokens.read = lambda: planner.blocks.allocator.num_used * block_size
    metrics.batch_max_total_tokens.read = lambda: planner.blocks.allocator.num_blocks * block_size
    metrics.kv_blocks_used.read = lambda: planner.blocks.allocator.num_used
    metrics.kv_blocks_free.read = lambda: planner.blocks.allocator.num_free
    metrics.prefix_cache_blocks.read = lambda: planner.blocks.allocator.num_cached
    metrics.request_preempted.read = lambda: planner.num_preempted
