"""The spans of this shard's steps, as children of the router's spans."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from text_generation_process.tracing import SERVICE, end_span, open_tracer
from text_generation_proto import pb

from text_generation_shard.config import ShardConfig


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


@contextmanager
def open_tracing(config: ShardConfig) -> Iterator[StepTracing]:
    """Send spans to the collector until the end of the block; see `open_tracer`."""
    assert config.otlp_endpoint is not None, "tracing is on"
    endpoint, name, rank = config.otlp_endpoint, config.otlp_service_name, config.rank
    with open_tracer(endpoint, name, version("pytgi"), {"rank": rank}) as tracer:
        yield StepTracing(tracer, rank)
