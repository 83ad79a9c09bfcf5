"""Sends spans to a collector with OpenTelemetry's packages, which are imported when a tracer is
opened."""

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

# Of the steps, in the names of their spans.
SERVICE = "text_generation.v1.TextGenerationService"
# How long a process waits at its end for unsent spans.
FLUSH_S = 2.0
# After that, how long the exporter has to stop.
_STOP_S = 0.2
# Default ports, as in TGI.
_PORTS = {"http": 80, "https": 443}
_SDK, _EXPORTER = "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"
_EXPORTER_LOG = f"{_EXPORTER}.exporter"

logger = logging.getLogger(__name__)


def collector(value: str) -> str:
    """The canonical address of a collector; ValueError names what was expected."""
    expected = "the gRPC address of a collector, like http://127.0.0.1:4317"
    try:
        url = urlsplit(value)
        port = url.port
    except ValueError as error:  # the port is not a number
        raise ValueError(expected) from error
    is_plain = url.path in ("", "/") and not (url.query or url.fragment or set("@ ") & set(value))
    is_good = url.scheme in _PORTS and url.hostname and port != 0 and value.isprintable()
    if not (is_good and is_plain):
        raise ValueError(expected)
    address = f"{url.scheme}://{url.netloc.rstrip(':')}"
    return address if port is not None else f"{address}:{_PORTS[url.scheme]}"


def missing_packages(endpoint: str | None) -> Iterator[str]:
    """The sentence for the user, if traces can not be sent because a package is missing."""
    if endpoint is None:
        return
    try:
        is_installed = None not in (find_spec(_SDK), find_spec(_EXPORTER))
    except ModuleNotFoundError:  # a parent package is missing, too
        is_installed = False
    if not is_installed:
        yield (
            "--otlp-endpoint needs OpenTelemetry, which is not installed: install it with "
            "`pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc`, or start "
            "without --otlp-endpoint"
        )


def mark_failed(span: "Span", error_type: str) -> None:
    """Gives the span an error, unless `error_type` is empty."""
    if error_type:
        from opentelemetry.trace import StatusCode

        span.set_status(StatusCode.ERROR)
        span.set_attribute("error.type", error_type)


def end_span(span: "Span | None", error: BaseException | None = None) -> None:
    """Ends the span, if there is one, with the error of what it measures."""
    if span is not None:
        mark_failed(span, "" if error is None else type(error).__name__)
        span.end()


def traceparent(span: "Span | None") -> str:
    """The span as the header `traceparent`; empty: no span."""
    if span is None:
        return ""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


@contextmanager
def open_tracer(
    endpoint: str, service_name: str, version: str, attributes: Mapping[str, str | int]
) -> Iterator["Tracer"]:
    """A tracer whose spans a thread sends to a collector in batches. At the end it waits up to
    `FLUSH_S` for the last ones. `attributes` describe this process.

    A slow or unreachable collector delays no request: spans are lost, and the log reports it. A
    span is sent if the trace that it continues is sampled. A new trace is sampled by
    OTEL_TRACES_SAMPLER, or always. No package may be missing.
    """
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # A failed try is a warning, and the failure of all of them an error.
    logging.getLogger(_EXPORTER_LOG).setLevel(logging.ERROR)
    exporter = OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http:"))
    resource = Resource.create(
        {"service.name": service_name, "service.version": version, **attributes}
    )
    # Not the global provider, which other packages would use for their spans.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield provider.get_tracer("pytgi", version)
    finally:
        _shut_down(provider, exporter, endpoint)


def _shut_down(provider: "TracerProvider", exporter: "SpanExporter", endpoint: str) -> None:
    """Sends the remaining spans, for a shorter time than the provider's own shutdown."""
    flushing = threading.Thread(target=provider.shutdown, name="flush-spans", daemon=True)
    flushing.start()
    flushing.join(FLUSH_S)
    if flushing.is_alive():
        logger.warning(
            "The last spans were not sent to %s within %g s, and are lost", endpoint, FLUSH_S
        )
        # The exporter logs the interruption of a call as failures, one with a traceback.
        for name in ("opentelemetry", _EXPORTER_LOG):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        exporter.shutdown()
        flushing.join(_STOP_S)
