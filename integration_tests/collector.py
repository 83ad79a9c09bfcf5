"""A collector of OpenTelemetry: a gRPC server that stores the spans it receives."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from integration_tests.server import wait_until

ERROR = 2
"""A status of OpenTelemetry's."""
SERVER, CLIENT = 2, 3
"""Kinds of spans."""
CLOCKS_S = 0.005
"""The tolerance of times that two clocks measure at one moment."""


@dataclass(frozen=True)
class Span:
    """A span as it was received; ids are hexadecimal, times in seconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    began: float
    ended: float
    attributes: Mapping[str, Any]
    links: Sequence[str]
    """Ids of spans."""
    status: int
    service: str


class Collector:
    """Owns the received spans, in order of arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    @property
    def spans(self) -> list[Span]:
        """All spans so far."""
        with self._lock:
            return list(self._spans)

    def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> Any:
        """The exporters' call."""
        with self._lock:
            self._spans += _spans(request)
        return pb.ExportTraceServiceResponse()

    def trace_of(self, request_id: str) -> tuple[Span, list[Span]]:
        """Waits for the span of the request with this id; returns it and its whole trace."""

        def found() -> list[Span]:
            return [s for s in self.spans if s.attributes.get("request_id") == request_id]

        wait_until(lambda: bool(found()), 20, f"the span of request {request_id} came")
        [root] = found()
        return root, [s for s in self.spans if s.trace_id == root.trace_id]


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector and its endpoint."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def _spans(request: pb.ExportTraceServiceRequest) -> Iterator[Span]:
    for of_resource in request.resource_spans:
        resource = {item.key: _value(item.value) for item in of_resource.resource.attributes}
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield Span(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    kind=span.kind,
                    began=span.start_time_unix_nano / 1e9,
                    ended=span.end_time_unix_nano / 1e9,
                    attributes={item.key: _value(item.value) for item in span.attributes},
                    links=[link.span_id.hex() for link in span.links],
                    status=span.status.code,
                    service=str(resource["service.name"]),
                )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return None if kind is None else getattr(value, kind)
