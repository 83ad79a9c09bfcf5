"""From the result of a step to metrics and to the text that clients read."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Literal

from text_generation_router.errors import GenerationError, GrammarFailedError, RouterError
from text_generation_router.metrics import Metrics
from text_generation_router.request import FinishReason, PrefillOutput, TokenOutput
from text_generation_router.scheduler.entry import Entry, EntryState
from text_generation_router.scheduler.plan import Plan, SchedulerLimits
from text_generation_router.scheduler.planner import Planner
from text_generation_router.scheduler.shards import StepResult

# Clients that get their tokens in one turn of the event loop. Then they write, and other tasks
# (/health, new requests) have a turn.
DELIVERIES_PER_TURN = 64


Method = Literal["prefill", "decode"]


class Delivery:
    """Makes the text of each step and gives every client its outputs; turns what the Batcher does
    into metrics. Queue, rows and blocks are read from the planner when the page is rendered."""

    def __init__(
        self,
        metrics: Metrics,
        planner: Planner,
        limits: SchedulerLimits,
        end: Callable[[Entry, RouterError | None], None],
    ) -> None:
        """`end` ends an entry, with its error if there is one."""
        self._metrics = metrics
        self._planner = planner
        self._chunks_prompts = limits.chunks_prompts
        self._end = end
        self.drop_s = 0.0
        """Time to drop rows on the shards since the last delivery, which counts it."""
        # Of the present delivery: times between tokens, and tokens gained by speculation, each with
        # the number of entries. Most entries of a step have the same.
        self._gaps: Counter[float] = Counter()
        self._skipped: Counter[int] = Counter()
        size = limits.block_size
        metrics.queue_size.read = lambda: len(planner.queue)
        metrics.batch_current_size.read = lambda: len(planner.running)
        metrics.batch_current_max_tokens.read = lambda: planner.blocks.allocator.num_used * size
        metrics.batch_max_total_tokens.read = lambda: planner.blocks.allocator.num_blocks * size
        metrics.kv_blocks_used.read = lambda: planner.blocks.allocator.num_used
        metrics.kv_blocks_free.read = lambda: planner.blocks.allocator.num_free
        metrics.prefix_cache_blocks.read = lambda: planner.blocks.allocator.num_cached
        metrics.request_preempted.read = lambda: planner.num_preempted

    def note_admission(self, plan: Plan) -> None:
        """Entries were admitted."""
        metrics = self._metrics
        metrics.batch_next_size.observe(len(plan.admitted))
        for entry in plan.admitted:
            metrics.prefix_cache_queried_tokens.inc(entry.num_inputs)
            metrics.prefix_cache_hit_tokens.inc(entry.num_cached_tokens)
        if len(plan.admitted) < len(plan.entries):
            waiting_reason = "backpressure" if self._planner.may_wait else "wait_exceeded"
            metrics.batch_concat.inc(reason="chunking" if self._chunks_prompts else waiting_reason)

    def note_step(self, method: Method, duration_s: float, result: StepResult) -> None:
        """A step succeeded."""
        metrics = self._metrics
        metrics.batch_inference_success.inc(method=method)
        if not (result.request_ids or result.forward_ns):
            return  # launched ahead, and all its rows had ended
        metrics.batch_inference_duration.observe(duration_s, method=method)
        metrics.batch_forward_duration.observe(result.forward_ns / 1e9, method=method)
        metrics.batch_decode_duration.observe(result.decode_ns / 1e9, method=method)
        if result.concat_ns is not None:
            metrics.batch_concat_duration.observe(result.concat_ns / 1e9, method="decode")
        for rank, shard_ns in enumerate(result.shard_ns):
            metrics.batch_shard_duration.observe(shard_ns / 1e9, rank=str(rank))

    async def deliver(self, plan: Plan, result: StepResult, method: Method) -> None:
        """Delivers one step, some entries in each turn of the event loop."""
        now = time.perf_counter()
        for request_id, message in result.errors.items():
            entry = plan.entries[request_id]
            failure = GrammarFailedError if entry.request.grammar else GenerationError
            self._end(entry, failure(message))
        columns = zip(result.token_ids, result.logprobs, result.top_tokens(), strict=True)
        answered = zip(result.request_ids, result.counts, result.finish_reasons, strict=True)
        for place, (request_id, num, finish_reason) in enumerate(answered, start=1):
            entry, tokens = plan.entries[request_id], list(islice(columns, num))
            if entry.state is not EntryState.ENDED and request_id not in result.errors:
                self._deliver(entry, tokens, finish_reason, result, now)
            if place % DELIVERIES_PER_TURN == 0:
                await asyncio.sleep(0)
        metrics = self._metrics
        for gap_s, times in self._gaps.items():
            metrics.request_inter_token_latency_duration.observe(gap_s, times)
        for num_skipped, times in self._skipped.items():
            metrics.request_skipped_tokens.observe(num_skipped, times)
        self._gaps.clear()
        self._skipped.clear()
        duration_s = time.perf_counter() - now + self.drop_s
        metrics.batch_filter_duration.observe(duration_s, method=method)
        self.drop_s = 0.0

    def _deliver(
        self,
        entry: Entry,
        tokens: Sequence[tuple[int, float, tuple[Sequence[int], Sequence[float]]]],
        finish_reason: FinishReason | None,
        result: StepResult,
        now: float,
    ) -> None:
        """Gives one client the tokens of a step; tokens behind a stop string are dropped."""
        if (prefill_logprobs := result.prefill_logprobs.get(entry.id)) is not None:
            tops = result.prefill_top_tokens.get(entry.id, ((), ()))
            ranks = result.prefill_ranks.get(entry.id, ())
            entry.prefill = entry.answer.prefill(prefill_logprobs, tops, ranks)
        elif entry.is_prompt_only:
            pooled = result.pooled_prompts.get(entry.id, b"")
            scores = result.token_scores.get(entry.id, ())
            entry.prefill = PrefillOutput((), pooled=pooled, scores=scores)
        outputs: list[TokenOutput] = []
        for token_id, logprob, top_tokens in tokens:
            reason = finish_reason if len(outputs) + 1 == len(tokens) else None
            output = entry.answer.step(token_id, logprob, reason, top_tokens)
            outputs.append(output)
            if output.generated is not None:
                self._end(entry, None)
                break
        entry.deliver(outputs)
        if not entry.is_prompt_only:
            self._note_tokens(entry, len(outputs), now)

    def _note_tokens(self, entry: Entry, num_tokens: int, now: float) -> None:
        if entry.last_delivered is None:
            self._metrics.request_time_to_first_token_duration.observe(now - entry.queued)
        else:
            self._gaps[now - entry.last_delivered] += 1
        if num_tokens > 1:
            self._gaps[0.0] += num_tokens - 1
        entry.last_delivered = now
        if entry.charge is not None:
            entry.charge(num_tokens, now)
        self._skipped[num_tokens - 1] += 1
