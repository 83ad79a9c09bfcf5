"""Traces of the real launcher, as a real collector gets them over gRPC."""

import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest

from integration_tests.collector import (
    CLIENT,
    CLOCKS_S,
    ERROR,
    SERVER,
    Collector,
    Span,
    collecting,
)
from integration_tests.server import LauncherHandle, running, wait_until

ROUTER, SHARD = "text-generation-inference.router", "text-generation-inference.server"
PREFILL, DECODE = (f"text_generation.v1.TextGenerationService/{m}" for m in ("Prefill", "Decode"))
# Spans are sent so soon.
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
PARENT = "b2" * 8


def traceparent(trace_id: str, flags: str = "01") -> dict[str, str]:
    """The header of a client whose own span is `PARENT`."""
    return {"traceparent": f"00-{trace_id}-{PARENT}-{flags}"}


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, str]]:
    with collecting() as both:
        yield both


@pytest.fixture(scope="module")
def server(collector: tuple[Collector, str]) -> Iterator[LauncherHandle]:
    with running(None, "--otlp-endpoint", collector[1], **SOON) as handle:
        yield handle


@pytest.fixture
def spans(collector: tuple[Collector, str]) -> Collector:
    return collector[0]


@contextmanager
def ended_inside(*flags: str, **environment: str) -> Iterator[LauncherHandle]:
    """A launcher that is ready, and is stopped within the block."""
    handle = LauncherHandle(None, *flags, **environment)
    try:
        handle.wait_until_ready()
        yield handle
    finally:
        handle.kill()


def ask(server: LauncherHandle, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    """The answer; traces begin and end with it."""
    return server.client.post(path, json=body, headers=headers)


def generate(num: int = 20, **parameters: Any) -> dict[str, Any]:
    """A body whose answer has this number of tokens."""
    asked = {"max_new_tokens": num, "ignore_eos_token": True, **parameters}
    return {"inputs": "What does textwrap.dedent do?", "parameters": asked}


def whole(spans: Collector, request_id: str, *wanted: str) -> tuple[Span, list[Span]]:
    """The span of a request and its whole trace, once all of these are here."""
    root, _ = spans.trace_of(request_id)

    def trace() -> list[Span]:
        return [span for span in spans.spans if span.trace_id == root.trace_id]

    wait_until(lambda: {s.name for s in trace()} >= set(wanted), 10, f"{wanted} came")
    return root, trace()


def named(trace: Sequence[Span], name: str, service: str = ROUTER) -> list[Span]:
    """In the order of time."""
    found = [span for span in trace if (span.name, span.service) == (name, service)]
    return sorted(found, key=lambda span: span.began)


def test_one_trace_from_the_client_to_the_shard(server: LauncherHandle, spans: Collector) -> None:
    trace_id = "a1" * 16
    answer = ask(server, "/generate", generate(200), **traceparent(trace_id))
    assert answer.status_code == 200
    request_id = answer.headers["x-request-id"]
    root, trace = whole(spans, request_id, "validation", "queue", "prefill", "decode", DECODE)
    wait_until(lambda: bool(named(spans.spans, DECODE, SHARD)), 10, "the shard's spans came")
    root, trace = whole(spans, request_id, PREFILL, DECODE)

    assert (root.trace_id, root.parent_id, root.kind) == (trace_id, PARENT, SERVER)
    assert (root.name, root.service, root.status) == ("POST /generate", ROUTER, 0)
    expected = {
        **{"http.request.method": "POST", "http.route": "/generate", "url.path": "/generate"},
        **{"http.response.status_code": 200, "request_id": request_id},
        **{"gen_ai.request.id": request_id, "gen_ai.request.model": "pytgi/embedded"},
        **{"gen_ai.operation.name": "text_completion", "gen_ai.request.max_tokens": 200},
        **{"gen_ai.usage.output_tokens": 200, "gen_ai.response.finish_reasons": ["length"]},
        **{"gen_ai.usage.input_tokens": int(answer.headers["x-prompt-tokens"])},
    }
    assert expected.items() <= root.attributes.items()
    assert "error.type" not in root.attributes

    phases = [named(trace, name) for name in ("validation", "queue", "prefill", "decode")]
    assert [len(found) for found in phases] == [1, 1, 1, 1]
    in_order = [span for found in phases for span in found]
    assert {span.parent_id for span in in_order} == {root.span_id}
    for before, after in pairwise(in_order):
        assert before.began <= before.ended <= after.began + CLOCKS_S
    assert root.began <= in_order[0].began + CLOCKS_S
    assert in_order[-1].ended <= root.ended + CLOCKS_S
    seconds = root.attributes["gen_ai.latency.time_in_model_prefill"]
    assert seconds == pytest.approx(phases[2][0].ended - phases[2][0].began, abs=CLOCKS_S)
    assert root.attributes["total_time"].endswith("s")

    # A phase is linked to the first and the last of its steps.
    [prefill], [decode] = phases[2:]
    [prefill_step], decode_steps = named(trace, PREFILL), named(trace, DECODE)
    assert (prefill_step.parent_id, prefill_step.kind) == (root.span_id, CLIENT)
    assert prefill.links == [prefill_step.span_id]
    assert {step.parent_id for step in decode_steps} == {root.span_id}
    assert decode.links == [decode_steps[0].span_id, decode_steps[-1].span_id]
    assert len(decode_steps) <= 2 + (decode.ended - decode.began), "not one for each token"

    # The shard's are below those of the router.
    [of_shard] = named(trace, PREFILL, SHARD)
    assert (of_shard.parent_id, of_shard.kind) == (prefill_step.span_id, SERVER)
    assert of_shard.attributes["forward_ns"] == prefill_step.attributes["forward_ns"] > 0
    assert of_shard.attributes["rank"] == 0
    assert named(trace, DECODE, SHARD)[0].parent_id == decode_steps[0].span_id


def test_a_stream_of_a_chat(server: LauncherHandle, spans: Collector) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 5}
    answer = ask(server, "/v1/chat/completions", body, **{"x-request-id": "chat-1"})
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers["x-request-id"] == "chat-1"
    root, trace = whole(spans, "chat-1", "prefill")
    assert (root.name, root.parent_id, root.status) == ("POST /v1/chat/completions", "", 0)
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["gen_ai.usage.output_tokens"] > 0
    assert len(named(trace, "prefill")) == 1


def test_several_sequences(server: LauncherHandle, spans: Collector) -> None:
    body = {"prompt": "Hello", "n": 3, "max_tokens": 4, "temperature": 1.0, "seed": 1}
    body |= {"ignore_eos": True}
    assert ask(server, "/v1/completions", body, **{"x-request-id": "three"}).status_code == 200
    root, trace = whole(spans, "three", "decode")
    assert len(named(trace, "validation")) == 1
    assert len(named(trace, "prefill")) == len(named(trace, "decode")) == 3
    assert root.attributes["gen_ai.usage.num_sequences"] == 3
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"] * 3
    # Each of them is linked to a step, wherever its span is.
    steps = {span.span_id for span in spans.spans if span.name in (PREFILL, DECODE)}
    for phase in (*named(trace, "prefill"), *named(trace, "decode")):
        assert phase.links and set(phase.links) <= steps


def test_prompts_that_are_not_continued(server: LauncherHandle, spans: Collector) -> None:
    body = {"input": ["a", "b", "c"] * 10}
    assert ask(server, "/v1/embeddings", body, **{"x-request-id": "many"}).status_code == 200
    root, trace = whole(spans, "many", "prefill")
    assert root.attributes["gen_ai.operation.name"] == "embeddings"
    assert root.attributes["gen_ai.usage.num_sequences"] == 30
    assert root.attributes["gen_ai.usage.output_tokens"] == 0
    assert "gen_ai.response.finish_reasons" not in root.attributes
    assert len(named(trace, "prefill")) == 16, "the number of sequences with spans is limited"
    assert not named(trace, "decode")


def test_a_trace_that_is_not_sampled_has_no_spans(server: LauncherHandle, spans: Collector) -> None:
    trace_id = "c3" * 16
    headers = {"x-request-id": "silent", **traceparent(trace_id, "00")}
    assert ask(server, "/generate", generate(), **headers).status_code == 200
    assert server.client.get("/health", headers=traceparent(trace_id)).status_code == 200
    ask(server, "/generate", generate(), **{"x-request-id": "told"})
    whole(spans, "told", "decode")
    assert all(span.trace_id != trace_id for span in spans.spans)
    assert all(span.attributes.get("request_id") != "silent" for span in spans.spans)


@pytest.mark.parametrize("header", ["junk", "00-" + "0" * 32 + "-" + PARENT + "-01", "ff-1-2-3"])
def test_a_bad_traceparent_begins_a_trace(
    server: LauncherHandle, spans: Collector, header: str
) -> None:
    answer = ask(server, "/generate", generate(1), traceparent=header)
    root, _ = spans.trace_of(answer.headers["x-request-id"])
    assert root.parent_id == ""


@pytest.mark.parametrize(
    ("path", "body", "status", "error_type"),
    [
        ("/generate", {"inputs": 3}, 422, "422"),
        ("/generate", generate(0), 422, "validation"),
        ("/generate", generate(10**6), 422, "validation"),
        ("/generate_stream", generate(10**6), 200, "validation"),
        ("/generate", {"inputs": "a", "parameters": {"adapter_id": "x"}}, 404, "adapter_not_found"),
        ("/nowhere", {}, 404, "404"),
    ],
)
def test_errors(
    server: LauncherHandle,
    spans: Collector,
    path: str,
    body: dict[str, Any],
    status: int,
    error_type: str,
) -> None:
    answer = ask(server, path, body)
    assert answer.status_code == status
    root, trace = spans.trace_of(answer.headers["x-request-id"])
    assert root.status == ERROR
    assert root.attributes["error.type"] == error_type
    assert root.attributes["http.response.status_code"] == status
    assert not named(trace, "prefill")


def test_a_client_that_leaves(server: LauncherHandle, spans: Collector) -> None:
    with server.client.stream(
        "POST", "/generate_stream", json=generate(2000), headers={"x-request-id": "left"}
    ) as response:
        next(response.iter_bytes())
    root, trace = whole(spans, "left", "decode")
    [decode] = named(trace, "decode")
    for span in (root, decode):
        assert (span.status, span.attributes["error.type"]) == (ERROR, "dropped")
    assert 0 < root.attributes["gen_ai.usage.output_tokens"] < 2000
    server.assert_idle()


def test_log_lines_bear_both_ids(server: LauncherHandle, spans: Collector) -> None:
    trace_id = "d4" * 16
    headers = {"x-request-id": "logged", **traceparent(trace_id)}
    assert ask(server, "/generate", generate(1), **headers).status_code == 200
    line = rf"Success .* route=/generate id=logged trace={trace_id}\n"
    wait_until(lambda: re.search(line, server.log) is not None, 5, "the line is in the log")


def test_a_collector_that_is_gone_or_silent() -> None:
    """Answers are as ever, and the end is not held up; the log says what became of the spans."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with ended_inside("--otlp-endpoint", endpoint, **SOON) as server:
            for _ in range(20):
                assert ask(server, "/generate", generate(5)).status_code == 200
            server.assert_idle()
            began = time.monotonic()
            log = server.stop()
    # OpenTelemetry's own end would take router and shard half a minute each.
    assert time.monotonic() - began < 20
    assert f"The last spans were not sent to {endpoint} within 2 s, and are lost" in log


def test_two_shards_send_at_the_end_what_was_not_sent_yet() -> None:
    """Under the name that was given."""
    with collecting() as (collector, endpoint):
        slowly = {"OTEL_BSP_SCHEDULE_DELAY": "600000"}
        flags = ("--otlp-endpoint", endpoint, "--otlp-service-name", "mine", "--num-shard", "2")
        with ended_inside(*flags, **slowly) as server:
            ask(server, "/generate", generate(3), **{"x-request-id": "late"})
            assert not collector.spans
            server.stop()
        _, trace = collector.trace_of("late")
    of_shards = [span for span in trace if span.name == PREFILL and span.kind == SERVER]
    assert {span.attributes["rank"] for span in of_shards} == {0, 1}
    assert {span.service for span in trace} == {"mine"}


def test_without_traces_nothing_is_imported() -> None:
    """The imported modules of each process, by Python itself. Newer FastAPIs import OpenTelemetry's
    API by themselves, which does nothing."""
    with ended_inside("--json-output", PYTHONPROFILEIMPORTTIME="1") as server:
        assert ask(server, "/generate", generate(3), **traceparent("e5" * 16)).status_code == 200
        log = server.stop()
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    imports: dict[str, set[str]] = {}
    for line in lines:
        if line["message"].startswith("import time:"):
            imports.setdefault(line["target"], set()).add(line["message"].split("|")[-1].strip())
    assert {"text_generation_router", "text_generation_shard"} <= imports.keys()
    assert "uvicorn" in imports["text_generation_router"]
    assert "torch" in imports["text_generation_shard"]
    own = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto")
    assert not [n for n in imports["text_generation_router"] if n.startswith(own)]
    assert not [n for n in imports["text_generation_router"] if ".tracing." in n]
    assert not [n for n in imports["text_generation_shard"] if "opentelemetry" in n]
