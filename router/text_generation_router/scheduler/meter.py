"""What the scheduler reports about itself."""

from typing import Literal

from text_generation_router.metrics import Metrics
from text_generation_router.scheduler.blocks import BlockAllocator
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.shards import StepResult

Method = Literal["prefill", "decode"]


class Meter:
    """Turns what the Batcher does into metrics, so that the Batcher's own text stays short."""

    def __init__(self, metrics: Metrics, allocator: BlockAllocator) -> None:
        self._metrics = metrics
        self._allocator = allocator
        # Time spent on dropping rows since the last delivery.
        self._drop_s = 0.0
        metrics.batch_max_total_tokens.set(allocator.num_blocks * allocator.block_size)
        self.note_load(0)

    def note_queue(self, size: int) -> None:
        """So many entries wait."""
        self._metrics.queue_size.set(size)

    def note_admission(self, size: int, num_running: int, was_patient: bool) -> None:
        """`size` entries were let in beside `num_running`; patient: the waiting were many."""
        self._metrics.batch_next_size.observe(size)
        if num_running:
            reason = "backpressure" if was_patient else "wait_exceeded"
            self._metrics.batch_concat.inc(reason=reason)

    def note_preemption(self) -> None:
        """An entry gave its blocks back."""
        self._metrics.request_preempted.inc()

    def note_load(self, num_running: int) -> None:
        """What is held now."""
        metrics, allocator = self._metrics, self._allocator
        metrics.batch_current_size.set(num_running)
        metrics.batch_current_max_tokens.set(allocator.num_used * allocator.block_size)
        metrics.kv_blocks_used.set(allocator.num_used)
        metrics.kv_blocks_free.set(allocator.num_free)

    def note_launch(self, method: Method, num_running: int) -> None:
        """A step is about to be sent."""
        self._metrics.batch_inference_count.inc(method=method)
        self.note_load(num_running)

    def note_failure(self, method: Method) -> None:
        """A step failed."""
        self._metrics.batch_inference_failure.inc(method=method)

    def note_step(self, method: Method, duration_s: float, result: StepResult) -> None:
        """A step succeeded; where its time went."""
        metrics = self._metrics
        metrics.batch_inference_success.inc(method=method)
        metrics.batch_inference_duration.observe(duration_s, method=method)
        metrics.batch_forward_duration.observe(result.forward_ns / 1e9, method=method)
        metrics.batch_decode_duration.observe(result.decode_ns / 1e9, method=method)
        if result.concat_ns is not None:
            metrics.batch_concat_duration.observe(result.concat_ns / 1e9, method="decode")

    def note_drop(self, duration_s: float) -> None:
        """Rows were dropped on the shards; belongs to the delivery that follows."""
        self._drop_s += duration_s

    def note_delivery(self, method: Method, duration_s: float) -> None:
        """The text of a step was made and handed over."""
        duration_s += self._drop_s
        self._metrics.batch_filter_duration.observe(duration_s, method=method)
        self._drop_s = 0.0

    def note_token(self, entry: Entry, now: float) -> None:
        """An entry's client was given a token at `now`; how long it waited for it."""
        if entry.last_delivered is None:
            self._metrics.request_time_to_first_token_duration.observe(now - entry.queued)
        else:
            duration_s = now - entry.last_delivered
            self._metrics.request_inter_token_latency_duration.observe(duration_s)
        entry.last_delivered = now
        # Without speculation every step gives one token: none is ever skipped.
        self._metrics.request_skipped_tokens.observe(0)
