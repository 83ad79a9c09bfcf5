"""The spans of a shard's steps. Over gRPC, with the router's: integration_tests/test_traces.py."""

import asyncio

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from text_generation_proto import pb
from text_generation_shard.config import ShardConfig
from text_generation_shard.server import serve
from text_generation_shard.tracing import StepTracing

CONTEXT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> StepTracing:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return StepTracing(provider.get_tracer("test"), rank=3)


async def settle(step: "asyncio.Future[pb.StepResponse]") -> None:
    """Let the callbacks of the step run."""
    await asyncio.wait({step})
    await asyncio.sleep(0)


async def test_a_step(tracing: StepTracing, exporter: InMemorySpanExporter) -> None:
    step: asyncio.Future[pb.StepResponse] = asyncio.get_running_loop().create_future()
    tracing.follow(step, "Decode", CONTEXT)
    await asyncio.sleep(0)
    assert not exporter.get_finished_spans()
    step.set_result(pb.StepResponse(forward_ns=5, decode_ns=6, total_ns=12))
    await settle(step)
    [span] = exporter.get_finished_spans()
    assert span.name == "text_generation.v1.TextGenerationService/Decode"
    assert (span.context.trace_id, span.parent.span_id) == (int("a" * 32, 16), int("b" * 16, 16))
    times = {"forward_ns": 5, "decode_ns": 6, "total_ns": 12, "rank": 3}
    assert times.items() <= span.attributes.items()
    assert span.status.status_code is StatusCode.UNSET


def test_a_wrong_endpoint_is_refused_before_anything_is_loaded(tmp_path) -> None:
    config = ShardConfig(tmp_path, uds_path=str(tmp_path / "s"), otlp_endpoint="localhost:4317")
    with pytest.raises(ValueError, match=r"`--otlp-endpoint` must be the gRPC address .* Given: l"):
        serve(config)
