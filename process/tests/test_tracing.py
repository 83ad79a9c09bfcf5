"""Spans that do not reach a collector. integration_tests/test_traces.py has those that do."""

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from text_generation_process import tracing
from text_generation_process.tracing import FLUSH_S, check_tracing, collector, open_tracer


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("http://127.0.0.1:4317", "http://127.0.0.1:4317"),
        ("https://collector.example/", "https://collector.example:443"),
        ("http://[::1]", "http://[::1]:80"),
        ("http://collector:", "http://collector:80"),
    ],
)
def test_endpoints(given: str, canonical: str) -> None:
    assert collector(given) == canonical


@pytest.mark.parametrize(
    "given",
    [
        *("", "localhost:4317", "http://", "http://:4317", "http://h:0", "http://h:99999"),
        *("http://h:4318/v1/traces", "grpc://h:4317", "http://h:x", "http://u:p@h:4317"),
        *("http://h:4317?a", "http://h h:4317", "http://h:4317/#a", "http://h\n:4317"),
    ],
)
def test_an_invalid_endpoint(given: str) -> None:
    with pytest.raises(ValueError, match=r"must be the gRPC address of a collector, like http://"):
        check_tracing(given)


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"])
def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """A package can be missing, or its parent package."""

    def find(name: str) -> object:
        if name == missing and "exporter" in name:
            raise ModuleNotFoundError(name)
        return None if name == missing else object()

    monkeypatch.setattr(tracing, "find_spec", find)
    with pytest.raises(ValueError, match=r"not installed: install it with `pip install opentel"):
        check_tracing("http://127.0.0.1:4317")


def test_nothing_is_imported_before_a_tracer_is_opened() -> None:
    code = (
        "import sys; from text_generation_process.tracing import check_tracing; "
        "check_tracing(None); print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """An interrupted shutdown silences loggers of the process."""
    names = ("opentelemetry", "opentelemetry.exporter.otlp.proto.grpc.exporter")
    before = [logging.getLogger(name).level for name in names]
    yield
    for name, level in zip(names, before, strict=True):
        logging.getLogger(name).setLevel(level)


def test_a_silent_collector_delays_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            caplog.at_level(logging.WARNING),
            open_tracer(endpoint, "test", "1", {}) as tracer,
        ):
            began = time.monotonic()
            for _ in range(5000):  # more than the queue holds
                tracer.start_span("a").end()
            ended = time.monotonic()
        closed = time.monotonic()
    assert ended - began < 5, "spans are made, and some dropped"
    assert closed - ended < FLUSH_S + 1
    assert f"The last spans were not sent to {endpoint} within 2 s, and are lost" in caplog.text


def test_a_collector_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{gone.getsockname()[1]}"
        began = time.monotonic()
        with (
            caplog.at_level(logging.WARNING),
            open_tracer(endpoint, "test", "1", {}) as tracer,
        ):
            tracer.start_span("a").end()
        assert time.monotonic() - began < FLUSH_S + 1
    assert "The last spans were not sent" in caplog.text
    assert "Transient error" not in caplog.text
