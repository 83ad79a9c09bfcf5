"""The spans of steps, the parents of the shards' own spans."""

import time
from collections.abc import Coroutine, Sequence
from typing import Any

from opentelemetry.trace import Span, SpanKind
from text_generation_process.tracing import SERVICE, end_span, traceparent

from text_generation_router.scheduler.plan import Plan
from text_generation_router.scheduler.shards import StepResult
from text_generation_router.scheduler.watch import Send
from text_generation_router.tracing.requests import SequenceTrace, TracedRequests

# A step has a span if it is the first of a sequence's phase, or if the last span of a step began
# longer ago than this: the number of spans grows with the seconds of a request, not its tokens.
EVERY_S = 1.0
# Requests that the span of a step links to.
MOST_LINKS = 16


class StepTrace:
    """Makes spans for some steps. The parent is the request of a sequence that is new to its phase,
    or else the oldest one; the span has links to the others in the step."""

    def __init__(self, requests: TracedRequests) -> None:
        self._requests = requests
        self._last_span = 0.0

    def __call__(self, plan: Plan, send: Send) -> Coroutine[Any, Any, StepResult]:
        """A step that is sent with the context of its span; see `watch.Trace`."""
        found = self._requests.sequences
        for entry in plan.admitted:
            if entry.id in found:
                found[entry.id].is_fresh = True
        rows = {i: found[i] for i in plan.entries if i in found}
        inside = [row for i, row in rows.items() if row.prefilled or i in plan.chunks]
        method, began = "Prefill" if plan.admitted else "Decode", time.time_ns()
        is_time = time.monotonic() - self._last_span > EVERY_S
        has_span = is_time or any(sequence.is_fresh for sequence in inside)
        span = self._span(method, began, inside) if has_span else None
        answer = send(traceparent(span))

        async def traced() -> StepResult:
            nonlocal span
            try:
                result = await answer
            except BaseException as error:
                end_span(span, error)
                raise
            if span is None and (last := result.ended & rows.keys()):
                # Only its result shows that a step is a sequence's last: the shards have no spans.
                span = self._span(method, began, [rows[i] for i in sorted(last)])
            for i in rows.keys() & set(result.request_ids):
                if not rows[i].prefilled:
                    rows[i].finish_prefill()
            if span is not None:
                span.set_attribute("batch_size", len(result.request_ids))
                span.set_attribute("forward_ns", result.forward_ns)
                span.set_attribute("decode_ns", result.decode_ns)
            end_span(span)
            return result

        return traced()

    def _span(self, method: str, began: int, inside: Sequence[SequenceTrace]) -> Span | None:
        """The span of a step; None: no sequence in it is traced."""
        fresh_first = sorted(inside, key=lambda sequence: not sequence.is_fresh)
        requests = list(dict.fromkeys(sequence.request for sequence in fresh_first))
        if not requests:
            return None
        span = self._requests.tracer.start_span(
            f"{SERVICE}/{method}",
            requests[0].context,
            SpanKind.CLIENT,
            {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method},
            [request.link for request in requests[1 : MOST_LINKS + 1]],
            began,
        )
        for sequence in inside:
            sequence.note_step(span.get_span_context())
        self._last_span = time.monotonic()
        return span
