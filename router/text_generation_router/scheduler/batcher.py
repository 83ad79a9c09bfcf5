"""Continuous batching: who computes what next.

One task, `Batcher.run`, drives the shards, one step at a time. The next step is launched before the
text of the last one is made, so that the router's work hides behind that of the shards. Therefore
what only the router can see (a stop string, a client that left) takes effect one step late, and the
token that was computed meanwhile is thrown away.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from text_generation_router.errors import (
    GenerationError,
    IncompleteGenerationError,
    RouterError,
    ValidationError,
)
from text_generation_router.metrics import Metrics
from text_generation_router.request import Output, Request, Timings
from text_generation_router.scheduler.answer import Answer
from text_generation_router.scheduler.blocks import BlockAllocator
from text_generation_router.scheduler.entry import Entry, EntryState
from text_generation_router.scheduler.meter import Meter, Method
from text_generation_router.scheduler.queue import Queue
from text_generation_router.scheduler.shards import CachedBatch, Shards, StepResult
from text_generation_router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# How often the event loop must turn until gRPC has written a call to its socket (test_shards.py).
TURNS_TO_SEND = 2


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler may fill. Counts are tokens unless they say otherwise."""

    num_blocks: int
    block_size: int
    # Rows.
    max_batch_size: int
    # In one prefill; a longer prompt is computed alone.
    max_batch_prefill_tokens: int
    # Held in KV blocks at once; does nothing when the blocks hold less.
    max_batch_total_tokens: int
    # Others join a running batch when this many times its size are waiting …
    waiting_served_ratio: float
    # … or when so many steps have passed since others joined.
    max_waiting_tokens: int
    # A row that grows beyond so many tokens writes all its blocks anew; None: none ever does.
    recompute_at: int | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """A Prefill or Decode under way. Its entries are those it computes a token for."""

    method: Method
    batch_id: int
    entries: dict[int, Entry]
    call: asyncio.Task[StepResult]
    launched: float


@dataclass(frozen=True, slots=True)
class _Reply:
    """A step that is computed and accounted for, but not delivered."""

    step: _Step
    result: StepResult


class Batcher:
    """Owns queue, blocks and every Entry; the only object that changes them.

    `submit` and `cancel` may be called at any time from the event loop. Every submitted entry ends
    in exactly one of finished, failed, cancelled.
    """

    def __init__(
        self, shards: Shards, tokenizer: Tokenizer, metrics: Metrics, limits: SchedulerLimits
    ) -> None:
        num_blocks = min(limits.num_blocks, limits.max_batch_total_tokens // limits.block_size)
        if num_blocks < 1:
            raise ValueError(
                f"`--max-batch-total-tokens` must be >= {limits.block_size}, one KV block. "
                f"Given: {limits.max_batch_total_tokens}"
            )
        self._shards = shards
        self._tokenizer = tokenizer
        self._limits = limits
        self._entry_ids = count()
        self._batch_ids = count()
        self._allocator = BlockAllocator(num_blocks, limits.block_size)
        self._queue = Queue()
        # Entries that hold blocks, oldest first. Those that end here (not on the shards) stay until
        # no step is under way.
        self._running: dict[int, Entry] = {}
        # The shards' receipt for the rows that exist; None when there are none.
        self._batch: CachedBatch | None = None
        self._reply: _Reply | None = None
        # Every entry that has not ended.
        self._live: dict[int, Entry] = {}
        self._steps_since_join = 0
        # A prefill that joined the batch is followed by a decode, so that nobody starves.
        self._must_decode = False
        self._work = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        self._call: asyncio.Task[StepResult] | None = None
        self._is_healthy = True
        # Set when no more entries are taken, for ever.
        self._refusal: Callable[[], RouterError] | None = None
        self._meter = Meter(metrics, self._allocator)

    # ---- Called by clients, between the steps of `run` ----

    def submit(self, request: Request) -> Entry:
        """Queues one request; see `submit_many`."""
        [entry] = self.submit_many([request])
        return entry

    def submit_many(self, requests: Sequence[Request]) -> list[Entry]:
        """Queues requests for one and the same prompt, which is computed once and shared.

        Only the first, which computes it, may ask for the prompt's log-probabilities. Raises
        ValidationError if one of them can never fit the KV blocks.
        """
        if self._refusal is not None:
            raise self._refusal()
        for request in requests:
            assert request.input_ids == requests[0].input_ids, "another prompt can share nothing"
            self._check_fits(request)
        assert not any(request.prefill_logprobs for request in requests[1:]), "only the first"
        entries = [
            Entry(next(self._entry_ids), request, Answer(request, self._tokenizer))
            for request in requests
        ]
        shares = len(entries) > 1 and not any(map(self._is_written_anew, requests))
        for entry in entries:
            entry.siblings = entries if shares else ()
            self._live[entry.id] = entry
            self._queue.append(entry)
        self._meter.note_queue(len(self._queue))
        self._work.set()
        return entries

    def _is_written_anew(self, request: Request) -> bool:
        """Whether the prompt's blocks are written again while it runs, and so can not be shared."""
        limit, num_inputs = self._limits.recompute_at, len(request.input_ids)
        return (
            limit is not None and num_inputs <= limit < num_inputs + request.stopping.max_new_tokens
        )

    def _check_fits(self, request: Request) -> None:
        num_tokens = len(request.input_ids) + request.stopping.max_new_tokens
        if self._allocator.num_blocks_for(num_tokens) > self._allocator.num_blocks:
            raise ValidationError(
                "`inputs` tokens + `max_new_tokens` must be <= "
                f"{self._allocator.num_blocks * self._allocator.block_size}, the size of the KV "
                f"cache. Given: {len(request.input_ids)} `inputs` tokens and "
                f"{request.stopping.max_new_tokens} `max_new_tokens`"
            )

    def cancel(self, entry: Entry) -> None:
        """Ends an entry nobody waits for; does nothing if it has ended."""
        self._end(entry, IncompleteGenerationError())

    @property
    def is_healthy(self) -> bool:
        """False from a failed step to the next success; False for ever once `run` is over."""
        return self._is_healthy and self._refusal is None

    async def probe(self) -> bool:
        """Asks the shards whether they take work; the answer becomes `is_healthy`."""
        try:
            await self._shards.health()
        except GenerationError as error:
            logger.warning("Health probe: %s", error)
            self._is_healthy = False
        else:
            self._is_healthy = True
        return self.is_healthy

    async def close(self) -> None:
        """Ends every entry with IncompleteGenerationError and waits until `run` has returned."""
        self._stop(IncompleteGenerationError)
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait({task})

    def integrity(self) -> None:
        """Asserts, between any two steps, that no block and no entry is lost."""
        self._queue.integrity()
        tables = [entry.block_table for entry in self._running.values()]
        self._allocator.integrity([table for table in tables if table is not None])
        assert None not in tables and list(self._running) == sorted(self._running)
        for entry in self._running.values():
            num_shared = entry.num_shareable_blocks(self._allocator.block_size)
            for sibling in entry.siblings:
                if entry.block_table is not None and sibling.block_table is not None:
                    ours, theirs = entry.block_table.block_ids, sibling.block_table.block_ids
                    assert ours[:num_shared] == theirs[:num_shared], "a prompt is there twice"
        undelivered = {} if self._reply is None else self._reply.step.entries
        places = {entry.id for entry in self._queue} | set(self._running) | set(undelivered)
        assert set(self._live) <= places, "an entry is nowhere"
        assert all(entry.id in self._live for entry in self._queue)

    # ---- The loop ----

    async def run(self) -> None:
        """Computes what is submitted until `close`; the one task that talks to the shards."""
        self._task = asyncio.current_task()
        try:
            while self._refusal is None:
                step = await self._launch_next()
                self._deliver_reply()
                if step is not None:
                    self._reply = await self._receive(step)
                elif not self._queue:
                    self._work.clear()
                    await self._work.wait()
        except asyncio.CancelledError:
            if self._refusal is None:
                raise
        except Exception:
            logger.exception("The scheduler has failed; this is a bug in the router")
            self._stop(lambda: GenerationError("internal error"))
            raise
        finally:
            self._stop(IncompleteGenerationError)
            if self._call is not None:
                self._call.cancel()
            self._sweep()
            self._meter.note_load(0)
            self._task = None

    async def _launch_next(self) -> _Step | None:
        """Chooses and launches a step; None when there is nothing to compute.

        No step is under way here. That is why blocks can change hands: the rows that used them are
        dropped before anything is launched that could write to them.
        """
        self._sweep()
        await self._drop_rows()
        if admitted := self._admit():
            cached_batch_id = None if self._batch is None else self._batch.id
            batch_id = next(self._batch_ids)
            call = self._shards.prefill(batch_id, admitted, cached_batch_id)
            self._must_decode = cached_batch_id is not None
            self._steps_since_join = 1
            entries = {entry.id: entry for entry in admitted}
            self._running |= entries
            return await self._launch("prefill", batch_id, entries, call)
        grown_blocks = self._grow()
        await self._drop_rows()
        if self._batch is None:
            self._meter.note_load(0)
            return None
        call = self._shards.decode([self._batch.id], grown_blocks)
        self._must_decode = False
        self._steps_since_join += 1
        return await self._launch("decode", self._batch.id, self._running.copy(), call)

    async def _launch(
        self,
        method: Method,
        batch_id: int,
        entries: dict[int, Entry],
        call: Coroutine[Any, Any, StepResult],
    ) -> _Step:
        """Sends a call to the shards and returns without its answer."""
        self._meter.note_launch(method, len(self._running))
        self._call = asyncio.create_task(call)
        step = _Step(method, batch_id, entries, self._call, time.perf_counter())
        for _ in range(TURNS_TO_SEND):
            await asyncio.sleep(0)
        return step

    async def _receive(self, step: _Step) -> _Reply | None:
        """Waits for a step and takes account of it; None if it failed."""
        try:
            result = await step.call
            if not result.is_answer_to(step.entries.keys(), self._running.keys()):
                raise GenerationError("Server error: the shard answered for other requests")
        except GenerationError as error:
            self._meter.note_failure(step.method)
            await self._fail(step.batch_id, step.entries.values(), error)
            return None
        self._is_healthy = True
        self._batch = result.batch
        for request_id, token_id, finish_reason in zip(
            result.request_ids, result.token_ids, result.finish_reasons, strict=True
        ):
            entry = step.entries[request_id]
            entry.token_ids.append(token_id)
            if finish_reason is not None or request_id in result.errors:
                self._release(entry)
        self._meter.note_step(step.method, time.perf_counter() - step.launched, result)
        return _Reply(step, result)

    def _deliver_reply(self) -> None:
        """Makes the text of the last reply and hands it to the clients."""
        if self._reply is None:
            return
        now = time.perf_counter()
        step, result = self._reply.step, self._reply.result
        for request_id, token_id, logprob, finish_reason, top_tokens in zip(
            result.request_ids,
            result.token_ids,
            result.logprobs,
            result.finish_reasons,
            result.top_tokens(),
            strict=True,
        ):
            entry = step.entries[request_id]
            if entry.state is EntryState.ENDED:
                continue
            if (message := result.errors.get(request_id)) is not None:
                self._end(entry, GenerationError(message))
                continue
            outputs: list[Output] = []
            if (prefill_logprobs := result.prefill_logprobs.get(request_id)) is not None:
                outputs.append(entry.answer.prefill(prefill_logprobs))
            output = entry.answer.step(token_id, logprob, finish_reason, top_tokens, entry.timings)
            if output.generated is not None:
                self._end(entry)
            entry.deliver(*outputs, output)
            self._meter.note_token(entry, now)
        self._meter.note_delivery(step.method, time.perf_counter() - now)
        self._reply = None

    # ---- Policy: who gets in, who gets blocks ----

    def _admit(self) -> list[Entry]:
        """The entries that join now, with their first blocks."""
        num_running = len(self._running)
        if num_running and self._must_decode:
            return []
        is_patient = self._steps_since_join < self._limits.max_waiting_tokens
        ratio = self._limits.waiting_served_ratio if num_running and is_patient else 0.0
        admitted = self._queue.next_batch(
            self._allocator,
            min_size=int(min(num_running * ratio, sys.maxsize)),
            max_size=self._limits.max_batch_size - num_running,
            max_prefill_tokens=self._limits.max_batch_prefill_tokens,
            num_running=num_running,
        )
        if admitted:
            now = time.perf_counter()
            for entry in admitted:
                entry.timings = entry.timings or Timings(entry.queued, now)
            self._meter.note_queue(len(self._queue))
            self._meter.note_admission(len(admitted), num_running, is_patient)
        return admitted

    def _grow(self) -> list[tuple[int, int]]:
        """Gives every running entry room for the token that the next decode writes.

        When no block is left the newest entry is preempted, which may be the one that asks. The
        oldest is never: alone, any entry fits (`submit`). Returns (request id, new block) pairs.
        """
        grown_blocks = []
        for entry in list(self._running.values()):
            while entry.block_table is not None and entry.block_table.num_slots < entry.num_tokens:
                block_id = self._allocator.grow(entry.block_table)
                if block_id is None:
                    self._preempt_newest()
                else:
                    grown_blocks.append((entry.id, block_id))
        return grown_blocks

    def _preempt_newest(self) -> None:
        """Takes the newest running entry's blocks; it will compute its tokens again."""
        assert len(self._running) > 1, "a single entry must always fit"
        newest = self._running[next(reversed(self._running))]
        self._release(newest)
        self._queue.put_back(newest)
        self._meter.note_preemption()
        self._meter.note_queue(len(self._queue))

    # ---- Endings ----

    def _end(self, entry: Entry, error: RouterError | None = None) -> None:
        """The one way out for an entry; its blocks, if any, follow when no step is under way."""
        if entry.state is EntryState.ENDED:
            return
        if entry.state is EntryState.QUEUED:
            self._queue.remove(entry)
            self._meter.note_queue(len(self._queue))
        entry.state = EntryState.ENDED
        del self._live[entry.id]
        if error is not None:
            entry.fail(error)

    def _release(self, entry: Entry) -> None:
        """Takes an entry's blocks back; no step that is under way may write to them."""
        del self._running[entry.id]
        assert entry.block_table is not None
        self._allocator.release(entry.block_table)
        entry.block_table = None

    def _sweep(self) -> None:
        """Releases the entries that ended here while a step was under way."""
        for entry in [e for e in self._running.values() if e.state is EntryState.ENDED]:
            self._release(entry)

    async def _drop_rows(self) -> None:
        """Has the shards forget the rows of entries that no longer run."""
        batch = self._batch
        if batch is None or len(batch.request_ids) == len(self._running):
            return
        started = time.perf_counter()
        try:
            if self._running:
                self._batch = await self._shards.filter_batch(batch.id, list(self._running))
            else:
                self._batch = None
                await self._shards.clear_cache(batch.id)
        except GenerationError as error:
            await self._fail(batch.id, list(self._running.values()), error)
        self._meter.note_drop(time.perf_counter() - started)

    async def _fail(self, batch_id: int, entries: Iterable[Entry], error: GenerationError) -> None:
        """Ends the entries of a failed call and has the shards forget its batch."""
        logger.error("Batch %d failed: %s", batch_id, error)
        self._is_healthy = False
        if self._batch is not None and self._batch.id == batch_id:
            self._batch = None
        for entry in entries:
            self._release(entry)
            self._end(entry, GenerationError(*error.args))
        try:
            await self._shards.clear_cache(batch_id)
        except GenerationError as clear_error:
            logger.warning("Batch %d could not be cleared: %s", batch_id, clear_error)

    def _stop(self, refusal: Callable[[], RouterError]) -> None:
        """Ends every entry and takes no more; what was decided first stays."""
        self._refusal = self._refusal or refusal
        for entry in list(self._live.values()):
            self._end(entry, self._refusal())
