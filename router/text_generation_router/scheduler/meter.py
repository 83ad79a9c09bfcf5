"""Metrics of the scheduler."""

from collections import Counter
from typing import Literal

from text_generation_router.metrics import Metrics
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.plan import Plan, SchedulerLimits
from text_generation_router.scheduler.planner import Planner
from text_generation_router.scheduler.shards import StepResult

Method = Literal["prefill", "decode"]


class Meter:
    """Turns what the Batcher does into metrics."""

    def __init__(self, metrics: Metrics, planner: Planner, limits: SchedulerLimits) -> None:
        self._metrics = metrics
        self._planner = planner
        self._chunks_prompts = limits.chunks_prompts
        # Time to drop rows since the last delivery.
        self._drop_s = 0.0
        # Of the present delivery: times between tokens, and tokens gained by speculation, each with
        # the number of entries. Most entries of a step have the same.
        self._gaps: Counter[float] = Counter()
        self._skipped: Counter[int] = Counter()
        allocator = planner.blocks.allocator
        metrics.batch_max_total_tokens.set(allocator.num_blocks * allocator.block_size)
        self.note_load()

    def note_queue(self) -> None:
        """The queue has changed."""
        self._metrics.queue_size.set(len(self._planner.queue))

    def note_admission(self, plan: Plan) -> None:
        """Entries were admitted."""
        metrics, planner = self._metrics, self._planner
        metrics.batch_next_size.observe(len(plan.admitted))
        for entry in plan.admitted:
            metrics.prefix_cache_queried_tokens.inc(entry.num_inputs)
            metrics.prefix_cache_hit_tokens.inc(entry.num_cached_tokens)
            if entry.num_reused_tokens is None:
                entry.num_reused_tokens = entry.num_cached_tokens
        if plan.advance is not None:
            waiting_reason = "backpressure" if planner.may_wait else "wait_exceeded"
            metrics.batch_concat.inc(reason="chunking" if self._chunks_prompts else waiting_reason)
        self.note_queue()

    def note_load(self) -> None:
        """Running entries, blocks and preemptions have changed."""
        metrics, planner = self._metrics, self._planner
        allocator, num_running = planner.blocks.allocator, len(planner.running)
        metrics.batch_current_size.set(num_running)
        metrics.batch_current_max_tokens.set(allocator.num_used * allocator.block_size)
        metrics.kv_blocks_used.set(allocator.num_used)
        metrics.kv_blocks_free.set(allocator.num_free)
        metrics.prefix_cache_blocks.set(len(planner.blocks.cache))
        if num_new := planner.num_preempted - metrics.request_preempted.value():
            metrics.request_preempted.inc(num_new)
            self.note_queue()

    def note_launch(self, method: Method) -> None:
        """A step is about to be sent."""
        self._metrics.batch_inference_count.inc(method=method)

    def note_failure(self, method: Method) -> None:
        """A step failed."""
        self._metrics.batch_inference_failure.inc(method=method)

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

    def note_drop(self, duration_s: float) -> None:
        """Rows were dropped on the shards; counts with the next delivery."""
        self._drop_s += duration_s

    def note_delivery(self, method: Method, duration_s: float) -> None:
        """A step was delivered."""
        metrics = self._metrics
        for gap_s, times in self._gaps.items():
            metrics.request_inter_token_latency_duration.observe(gap_s, times)
        for num_skipped, times in self._skipped.items():
            metrics.request_skipped_tokens.observe(num_skipped, times)
        self._gaps.clear()
        self._skipped.clear()
        duration_s += self._drop_s
        self._metrics.batch_filter_duration.observe(duration_s, method=method)
        self._drop_s = 0.0

    def note_tokens(self, entry: Entry, num_tokens: int, now: float) -> None:
        """An entry's client got tokens at `now`."""
        if entry.last_delivered is None:
            self._metrics.request_time_to_first_token_duration.observe(now - entry.queued)
        else:
            self._gaps[now - entry.last_delivered] += 1
        if num_tokens > 1:
            self._gaps[0.0] += num_tokens - 1
        entry.last_delivered = now
        self._skipped[num_tokens - 1] += 1
