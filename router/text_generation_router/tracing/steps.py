"""The spans of steps, the parents of the shards' own spans."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanKind, set_span_in_context
from text_generation_process.tracing import SERVICE, end_span, traceparent

from text_generation_router.scheduler.plan import Plan
from text_generation_router.scheduler.shards import CachedBatch, StepResult
from text_generation_router.scheduler.watch import WatchedShards
from text_generation_router.tracing.requests import SequenceTrace, TracedRequests

# A step has a span if it is the first of a sequence's phase, or if the last span of a step began
# longer ago than this: the number of spans grows with the seconds of a request, not its tokens.
EVERY_S = 1.0
# Sequences that the span of a step links to.
MOST_LINKS = 16


class TracedShards(WatchedShards):
    """WatchedShards with spans for some steps. The parent is a sequence that is new to its phase,
    or else the oldest one; the span has links to the others in the step.

    Owns which of the traced sequences have rows.
    """

    def __init__(self, requests: TracedRequests, *arguments: Any) -> None:
        """`arguments`: see WatchedShards."""
        super().__init__(*arguments)
        self._requests = requests
        # The traced sequences that have rows, oldest first.
        self._rows: dict[int, SequenceTrace] = {}
        self._last_span = 0.0

    async def step(
        self, plan: Plan, batch_id: int, cached_batch_id: int | None = None, trace_context: str = ""
    ) -> StepResult:
        """See `WatchedShards.step`. The trace context is the span's."""
        if plan.advance is None:
            self._rows.clear()  # the others are gone, perhaps with lost shards
        found = self._requests.sequences
        new = {entry.id: found[entry.id] for entry in plan.admitted if entry.id in found}
        for sequence in new.values():
            sequence.enter()
        self._rows |= new
        method, began = "Prefill" if plan.admitted else "Decode", time.time_ns()
        inside = [s for i, s in self._rows.items() if s.is_decoding or i in plan.chunks]
        is_time = time.monotonic() - self._last_span > EVERY_S
        has_span = is_time or any(sequence.is_fresh for sequence in inside)
        span = self._span(method, began, inside) if has_span else None
        try:
            result = await super().step(plan, batch_id, cached_batch_id, traceparent(span))
        except BaseException as error:
            self._forget(new)
            end_span(span, error)
            raise
        self._settle(method, began, span, result)
        return result

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        """See `Shards.filter_batch`."""
        batch = await super().filter_batch(batch_id, request_ids)
        self._forget(self._rows.keys() - set(batch.request_ids))
        return batch

    def _span(self, method: str, began: int, inside: Sequence[SequenceTrace]) -> Span | None:
        """The span of a step; None: all sequences in it have ended."""
        fresh_first = sorted(inside, key=lambda sequence: not sequence.is_fresh)
        contexts = [c for sequence in fresh_first if (c := sequence.context) is not None]
        if not contexts:
            return None
        span = self._requests.tracer.start_span(
            f"{SERVICE}/{method}",
            set_span_in_context(NonRecordingSpan(contexts[0]), Context()),
            SpanKind.CLIENT,
            {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method},
            [Link(context) for context in contexts[1 : MOST_LINKS + 1]],
            began,
        )
        for sequence in inside:
            sequence.note_step(span.get_span_context())
        self._last_span = time.monotonic()
        return span

    def _settle(self, method: str, began: int, span: Span | None, result: StepResult) -> None:
        """A step has succeeded."""
        ended = result.ended & self._rows.keys()
        if ended and span is None:
            # Only its result shows that a step is a sequence's last: the shards have no spans then.
            span = self._span(method, began, [self._rows[i] for i in sorted(ended)])
        for i in self._rows.keys() & set(result.request_ids):
            if not self._rows[i].is_decoding:
                self._rows[i].finish_prefill(goes_on=i not in ended)
        self._forget(ended)
        if span is not None:
            span.set_attribute("batch_size", len(result.request_ids))
            span.set_attribute("forward_ns", result.forward_ns)
            span.set_attribute("decode_ns", result.decode_ns)
        end_span(span)

    def _forget(self, entry_ids: Iterable[int]) -> None:
        for i in entry_ids:
            self._rows.pop(i, None)
