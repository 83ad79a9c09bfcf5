"""Continuous batching: who computes what next.

One task, `Batcher.run`, drives the shards. The next step is launched before the text of the last
one is made, so that the router's work hides behind that of the shards. Where they leave the router
a core and the next step can do without the answer to the last one, it is even launched shortly
before that comes, and the shards go from one to the other at once. Therefore what only the router
can see (a stop string, a client that left) takes effect one or two steps late, and what was
computed meanwhile is thrown away.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
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
from text_generation_router.request import FinishReason, Output, PrefillOutput, Request, Timings
from text_generation_router.scheduler.answer import Answer
from text_generation_router.scheduler.entry import Entry, EntryState
from text_generation_router.scheduler.meter import Meter, Method
from text_generation_router.scheduler.plan import Plan, SchedulerLimits
from text_generation_router.scheduler.planner import Planner
from text_generation_router.scheduler.shards import (
    CachedBatch,
    LostStepError,
    Shards,
    StepResult,
)
from text_generation_router.tokenizer import Tokenizer

__all__ = ["Batcher", "SchedulerLimits"]

logger = logging.getLogger(__name__)

# How often the event loop must turn until gRPC has written a call to its socket (test_shards.py).
TURNS_TO_SEND = 2
# Clients that are given their tokens in one turn of the event loop. Then they write, some 2 ms for
# all of them, and whoever waits for the loop (/health, newcomers) has a turn.
DELIVERIES_PER_TURN = 64
# So long before the answer to a step is due the next one is launched, if it can be: what an answer
# and a call take on their way where all cores compute. With 2 ms, three of five calls came when the
# step was over, with 6 one of four, with 8 one of eight. Those who come meanwhile wait for a step
# more, so it is no longer.
AHEAD_S = 0.008
# For so long a step that succeeded proves that the shards take work.
FRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class _Step:
    """A Prefill or Decode under way."""

    plan: Plan
    batch_id: int
    call: asyncio.Task[StepResult]
    launched: float

    @property
    def method(self) -> Method:
        """The call that was made."""
        return "prefill" if self.plan.admitted else "decode"


@dataclass(frozen=True, slots=True)
class _Reply:
    """A step that is computed and accounted for, but not delivered."""

    step: _Step
    result: StepResult


class Batcher:
    """Owns the Planner (queue and blocks) and every Entry; the only one that has them changed.

    `submit` and `cancel` may be called at any time from the event loop. Every submitted entry ends
    in exactly one of finished, failed, cancelled.
    """

    def __init__(
        self, shards: Shards, tokenizer: Tokenizer, metrics: Metrics, limits: SchedulerLimits
    ) -> None:
        self._shards = shards
        self._tokenizer = tokenizer
        self._entry_ids = count()
        self._batch_ids = count()
        self._planner = Planner(limits)
        # The shards' receipt for the rows that exist; None when there are none.
        self._batch: CachedBatch | None = None
        self._reply: _Reply | None = None
        # Every entry that has not ended.
        self._live: dict[int, Entry] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        # The calls under way, and the step that was launched behind the one that we wait for.
        self._calls: set[asyncio.Task[StepResult]] = set()
        self._ahead: _Step | None = None
        # How long the last decode took.
        self._decode_s = 0.0
        self._is_healthy = True
        # When the last step came back.
        self._last_success = -math.inf
        # Set when no more entries are taken, for ever: what newcomers are told.
        self._refusal: Callable[[], RouterError] | None = None
        self._meter = Meter(metrics, self._planner, limits)

    # ---- Called by clients, between the steps of `run` ----

    def submit(self, request: Request) -> Entry:
        """Queues one request; see `submit_many`."""
        [entry] = self.submit_many([request])
        return entry

    def submit_many(self, requests: Sequence[Request]) -> list[Entry]:
        """Queues requests for one and the same prompt, which is computed once and shared.

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
            Entry(entry_id, request, Answer(request, self._tokenizer), group)
            for entry_id, request in zip(ids, requests, strict=True)
        ]
        for entry in entries:
            self._live[entry.id] = entry
            self._planner.queue.append(entry)
        self._meter.note_queue()
        self._work.set()
        return entries

    def _check_fits(self, request: Request) -> None:
        num_tokens = len(request.input_ids) + request.stopping.max_new_tokens
        allocator = self._planner.allocator
        if allocator.num_blocks_for(num_tokens) > allocator.num_blocks:
            raise ValidationError(
                "`inputs` tokens + `max_new_tokens` must be <= "
                f"{allocator.num_blocks * allocator.block_size}, the size of the KV "
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
        """Asks the shards whether they take work; the answer becomes `is_healthy`.

        It does not ask while steps succeed: they say so themselves, and the answer would be late.
        """
        is_fresh = time.perf_counter() - self._last_success < FRESH_S
        if self._is_healthy and is_fresh and self._planner.running:
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
        """Ends every entry with IncompleteGenerationError and waits until `run` has returned."""
        self._stop()
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait({task})

    def integrity(self) -> None:
        """Asserts, between any two steps, that no block and no entry is lost."""
        self._planner.integrity()
        undelivered = {} if self._reply is None else self._reply.step.plan.entries
        queue = self._planner.queue
        places = {entry.id for entry in queue} | set(self._planner.running) | set(undelivered)
        assert set(self._live) <= places, "an entry is nowhere"
        assert all(entry.id in self._live for entry in queue)

    # ---- The loop ----

    async def run(self) -> None:
        """Computes what is submitted until `close`; the one task that talks to the shards."""
        self._task = asyncio.current_task()
        try:
            while self._refusal is None:
                step, self._ahead = self._ahead or await self._launch_next(), None
                await self._deliver_reply()
                if step is not None:
                    self._ahead = await self._launch_ahead(step)
                    self._reply = await self._receive(step)
                elif not self._planner.queue:
                    self._work.clear()
                    await self._work.wait()
        except asyncio.CancelledError:
            if self._refusal is None:
                raise
        except Exception:
            logger.exception("The scheduler has failed; this is a bug in the router")
            self._stop(lambda: GenerationError("internal error"), UnhealthyError)
            raise
        finally:
            self._stop()
            for call in self._calls:
                call.cancel()
            self._planner.sweep()
            self._meter.note_load()
            self._task = None

    async def _launch_next(self) -> _Step | None:
        """Chooses and launches a step; None when there is nothing to compute.

        No step is under way here. That is why blocks can change hands: the rows that used them are
        dropped before anything is launched that could write to them.
        """
        planner = self._planner
        planner.sweep()
        advance = planner.advance()
        await self._drop_rows()
        batch = self._batch
        plan = planner.plan(None if batch is None else advance)
        self._meter.note_load()
        if plan is None:
            return None
        if plan.admitted:
            self._note_admission(plan)
            batch_id = next(self._batch_ids)
            cached_id = None if batch is None else batch.id
            call = self._shards.prefill(batch_id, plan.admitted, cached_id, plan.advance)
        else:
            assert batch is not None and plan.advance is not None
            batch_id = batch.id
            call = self._shards.decode([batch_id], plan.advance)
        step = self._launch(plan, batch_id, call)
        for _ in range(TURNS_TO_SEND):
            await asyncio.sleep(0)
        return step

    async def _launch_ahead(self, step: _Step) -> _Step | None:
        """Launches the step behind one that is about to be done; None where that can not be.

        Blocks do not change hands here: those who end in `step` have no rows in the next.
        """
        if not self._planner.is_steady(step.plan):
            return None
        began = max(step.launched, self._last_success)
        if (wait_s := began + self._decode_s - AHEAD_S - time.perf_counter()) > 0:
            await asyncio.wait({step.call}, timeout=wait_s)
        plan = None if step.call.done() else self._planner.plan_ahead(step.plan)
        if plan is None:
            return None
        assert plan.advance is not None
        return self._launch(plan, step.batch_id, self._shards.decode([step.batch_id], plan.advance))

    def _launch(self, plan: Plan, batch_id: int, call: Coroutine[Any, Any, StepResult]) -> _Step:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        step = _Step(plan, batch_id, task, time.perf_counter())
        self._meter.note_launch(step.method)
        return step

    def _note_admission(self, plan: Plan) -> None:
        now = time.perf_counter()
        for entry in plan.admitted:
            entry.timings = entry.timings or Timings(entry.queued, now)
        self._meter.note_admission(plan)

    async def _receive(self, step: _Step) -> _Reply | None:
        """Waits for a step and takes account of it; None if it failed."""
        try:
            result = await step.call
            if not result.is_answer_to(step.plan.asked, step.plan.entries.keys()):
                raise LostStepError("Server error: the shard answered for other requests")
        except GenerationError as error:
            self._meter.note_failure(step.method)
            if self._ahead is not None:
                # Whatever it says, it stands on what has failed.
                self._meter.note_failure(self._ahead.method)
                await asyncio.gather(self._ahead.call, return_exceptions=True)
                self._ahead = None
            await self._fail_step(step, error)
            return None
        self._is_healthy = True
        began, self._last_success = max(step.launched, self._last_success), time.perf_counter()
        self._batch = result.batch
        self._planner.settle(step.plan, result)
        if self._ahead is not None and (ended := result.ended):
            self._ahead = replace(self._ahead, plan=self._ahead.plan.without(ended))
        if step.plan.entries and not step.plan.chunks:
            self._decode_s = (result.forward_ns + result.decode_ns) / 1e9
        self._meter.note_step(step.method, self._last_success - began, result)
        return _Reply(step, result)

    async def _deliver_reply(self) -> None:
        """Makes the text of the last reply and hands it to the clients, some in each turn."""
        if self._reply is None:
            return
        now = time.perf_counter()
        step, result = self._reply.step, self._reply.result
        for request_id, message in result.errors.items():
            self._end(step.plan.entries[request_id], GenerationError(message))
        columns = zip(result.token_ids, result.logprobs, result.top_tokens(), strict=True)
        answered = zip(result.request_ids, result.counts, result.finish_reasons, strict=True)
        for place, (request_id, num, finish_reason) in enumerate(answered, start=1):
            entry, tokens = step.plan.entries[request_id], list(islice(columns, num))
            if entry.state is not EntryState.ENDED:
                self._deliver(entry, tokens, finish_reason, result, now)
            if place % DELIVERIES_PER_TURN == 0:
                await asyncio.sleep(0)
        self._meter.note_delivery(step.method, time.perf_counter() - now)
        self._reply = None

    def _deliver(
        self,
        entry: Entry,
        tokens: Sequence[tuple[int, float, tuple[Sequence[int], Sequence[float]]]],
        finish_reason: FinishReason | None,
        result: StepResult,
        now: float,
    ) -> None:
        """Hands one client the tokens of a step; those behind a stop string are thrown away."""
        outputs: list[Output] = []
        if (prefill_logprobs := result.prefill_logprobs.get(entry.id)) is not None:
            tops = result.prefill_top_tokens.get(entry.id, ((), ()))
            ranks = result.prefill_ranks.get(entry.id, ())
            outputs.append(entry.answer.prefill(prefill_logprobs, tops, ranks))
        elif entry.request.is_prompt_only:
            pooled = result.pooled_prompts.get(entry.id, b"")
            scores = result.token_scores.get(entry.id, ())
            outputs.append(PrefillOutput((), pooled=pooled, scores=scores))
        num_tokens = 0
        for token_id, logprob, top_tokens in tokens:
            num_tokens += 1
            reason = finish_reason if num_tokens == len(tokens) else None
            output = entry.answer.step(token_id, logprob, reason, top_tokens, entry.timings)
            outputs.append(output)
            if output.generated is not None:
                self._end(entry)
                break
        entry.deliver(*outputs)
        if not entry.request.is_prompt_only:
            self._meter.note_tokens(entry, num_tokens, now)

    # ---- Endings ----

    def _end(self, entry: Entry, error: RouterError | None = None) -> None:
        """The one way out for an entry; its blocks, if any, follow when no step is under way."""
        if entry.state is EntryState.ENDED:
            return
        if entry.state is EntryState.QUEUED:
            self._planner.queue.remove(entry)
            self._meter.note_queue()
        entry.state = EntryState.ENDED
        del self._live[entry.id]
        if error is not None:
            entry.fail(error)

    async def _drop_rows(self) -> None:
        """Has the shards forget the rows of entries that no longer run."""
        batch, running = self._batch, self._planner.running
        if batch is None or len(batch.request_ids) == len(running):
            return
        started = time.perf_counter()
        try:
            if running:
                self._batch = await self._shards.filter_batch(batch.id, list(running))
            else:
                self._batch = None
                await self._shards.clear_cache(batch.id)
        except GenerationError as error:
            self._fail(batch.id, list(running.values()), error)
            self._batch = None
            await self._clear(batch.id)
        self._meter.note_drop(time.perf_counter() - started)

    async def _fail_step(self, step: _Step, error: GenerationError) -> None:
        """Ends those a failed step was made for: the new ones of a Prefill, or else all.

        The rows that were there before a Prefill are as they were, unless nobody can say so.
        """
        batch, entries = self._batch, step.plan.admitted
        if not entries or isinstance(error, LostStepError):
            self._batch, entries = None, list(step.plan.entries.values())
        self._planner.is_closed = True
        self._fail(step.batch_id, entries, error)
        await self._clear(step.batch_id)
        if self._batch is None and batch is not None and batch.id != step.batch_id:
            await self._clear(batch.id)

    def _fail(self, batch_id: int, entries: Iterable[Entry], error: GenerationError) -> None:
        logger.error("Batch %d failed: %s", batch_id, error)
        self._is_healthy = False
        for entry in entries:
            self._planner.release(entry)
            self._end(entry, GenerationError(*error.args))

    async def _clear(self, batch_id: int) -> None:
        try:
            await self._shards.clear_cache(batch_id)
        except GenerationError as clear_error:
            logger.warning("Batch %d could not be cleared: %s", batch_id, clear_error)

    def _stop(
        self,
        ending: Callable[[], RouterError] = IncompleteGenerationError,
        refusal: Callable[[], RouterError] = ShuttingDownError,
    ) -> None:
        """Ends every entry and takes no more; what was decided first stays."""
        self._refusal = self._refusal or refusal
        for entry in list(self._live.values()):
            self._end(entry, ending())
