"""The spans of this shard's steps, as children of the router's spans."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from text_generation_process.tracing import open_tracer
from text_generation_proto import pb

from text_generation_shard.config import ShardConfig

_SERVICE = "text_generation.v1.TextGenerationService"
_PROPAGATOR = TraceContextTextMapPropagator()


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
            f"{_SERVICE}/{method}",
            _PROPAGATOR.extract({"traceparent": trace_context}, Context()),
            SpanKind.SERVER,
            {
                "rpc.system": "grpc",
                "rpc.service": _SERVICE,
                "rpc.method": method,
                "rank": self._rank,
            },
        )
        step.add_done_callback(partial(_end, span))


def _end(span: Span, step: "asyncio.Future[pb.StepResponse]") -> None:
    error: BaseException | None = None
    if step.cancelled():
        error = asyncio.CancelledError()
    elif (error := step.exception()) is None:
        times = step.result()
        span.set_attributes(
            {
                "forward_ns": times.forward_ns,
                "decode_ns": times.decode_ns,
                "total_ns": times.total_ns,
            }
        )
    if error is not None:
        span.set_status(StatusCode.ERROR)
        span.set_attribute("error.type", type(error).__name__)
    span.end()


@contextmanager
def open_tracing(config: ShardConfig) -> Iterator[StepTracing]:
    """Send spans to the collector until the end of the block; see `open_tracer`."""
    assert config.otlp_endpoint is not None, "tracing is on"
    endpoint, name, rank = config.otlp_endpoint, config.otlp_service_name, config.rank
    with open_tracer(endpoint, name, version("pytgi"), {"rank": rank}) as tracer:
        yield StepTracing(tracer, rank)
