"""The spans of this shard's steps, as children of the router's spans."""

import asyncio
from functools import partial

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from text_generation_process.tracing import SERVICE, end_span
from text_generation_proto import pb


class StepTracing:
    """Makes spans of the steps whose messages carry a trace context."""

    def __init__(self, tracer: Tracer, rank: int) -> None:
        self._tracer = tracer
        self._rank = rank

    def follow(
        self, step: "asyncio.Future[pb.StepResponse]", method: str, trace_context: str
    ) -> None:
        """Start the span of a step that has just arrived; it ends with the step."""
        span = self._tracer.start_span(
            f"{SERVICE}/{method}",
            TraceContextTextMapPropagator().extract({"traceparent": trace_context}, Context()),
            SpanKind.SERVER,
            {
                "rpc.system": "grpc",
                "rpc.service": SERVICE,
                "rpc.method": method,
                "rank": self._rank,
            },
        )
        step.add_done_callback(partial(_end, span))


def _end(span: Span, step: "asyncio.Future[pb.StepResponse]") -> None:
    error = asyncio.CancelledError() if step.cancelled() else step.exception()
    if error is None:
        times = step.result()
        for name in ("forward_ns", "decode_ns", "total_ns"):
            span.set_attribute(name, getattr(times, name))
    end_span(span, error)
