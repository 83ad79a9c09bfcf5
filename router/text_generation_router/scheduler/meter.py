"""Metrics of the scheduler."""

from typing import Literal

from text_generation_router.metrics import Metrics
from text_generation_router.scheduler.plan import Plan, SchedulerLimits
from text_generation_router.scheduler.planner import Planner
from text_generation_router.scheduler.shards import StepResult

Method = Literal["prefill", "decode"]


class Meter:
    """Turns what the Batcher does into metrics. Queue, rows and blocks are read from the planner
    when the page is rendered."""

    def __init__(self, metrics: Metrics, planner: Planner, limits: SchedulerLimits) -> None:
        self._metrics = metrics
        self._planner = planner
        self._chunks_prompts = limits.chunks_prompts
        blocks, size = planner.blocks, limits.block_size
        metrics.queue_size.read = lambda: len(planner.queue)
        metrics.batch_current_size.read = lambda: len(planner.running)
        metrics.batch_current_max_tokens.read = lambda: blocks.allocator.num_used * size
        metrics.batch_max_total_tokens.read = lambda: blocks.allocator.num_blocks * size
        metrics.kv_blocks_used.read = lambda: blocks.allocator.num_used
        metrics.kv_blocks_free.read = lambda: blocks.allocator.num_free
        metrics.prefix_cache_blocks.read = lambda: len(blocks.cache)
        metrics.request_preempted.read = lambda: planner.num_preempted

    def note_admission(self, plan: Plan) -> None:
        """Entries were admitted."""
        metrics = self._metrics
        metrics.batch_next_size.observe(len(plan.admitted))
        for entry in plan.admitted:
            metrics.prefix_cache_queried_tokens.inc(entry.num_inputs)
            metrics.prefix_cache_hit_tokens.inc(entry.num_cached_tokens)
        if plan.advance is not None:
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
