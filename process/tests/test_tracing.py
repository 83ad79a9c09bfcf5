"""Where traces can be sent to. integration_tests/test_traces.py has those that are sent."""

import pytest
from text_generation_process import tracing
from text_generation_process.tracing import collector, missing_packages


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
    with pytest.raises(ValueError, match=r"the gRPC address of a collector, like http://"):
        collector(given)


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"])
def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """A package can be missing, or its parent package."""

    def find(name: str) -> object:
        if name == missing and "exporter" in name:
            raise ModuleNotFoundError(name)
        return None if name == missing else object()

    monkeypatch.setattr(tracing, "find_spec", find)
    [sentence] = missing_packages("http://127.0.0.1:4317")
    assert "not installed: install it with `pip install opentel" in sentence
    assert not list(missing_packages(None))
