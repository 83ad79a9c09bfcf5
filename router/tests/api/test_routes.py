"""The routes of a running server: bodies to the byte, headers, statuses."""

import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from text_generation_router.api.tgi import info
from text_generation_router.app import create_app
from text_generation_router.errors import GenerationError
from text_generation_router.logs import LineFormatter
from text_generation_router.scheduler.batcher import Batcher

from router.tests.serving import Server, assemble_scripted, serve


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serve(tmp_path, "hé!") as server:
        yield server


async def test_generate(server: Server) -> None:
    request = {"inputs": "né", "parameters": {"max_new_tokens": 3}}
    response = await server.client.post("/generate", json=request)
    assert response.status_code == 200
    assert response.text == '{"generated_text":"hé"}'
    headers = response.headers
    assert headers["content-type"] == "application/json"
    assert headers["x-compute-type"] == "1-cpu"
    assert headers["x-compute-characters"] == "2"
    assert headers["x-prompt-tokens"] == "4"
    assert headers["x-generated-tokens"] == "3"
    assert re.fullmatch(r"\d+\.\d+", headers["x-compute-time"])
    for name in ("total-time", "validation-time", "queue-time", "inference-time"):
        assert headers[f"x-{name}"].isdecimal()
    assert headers["x-time-per-token"].isdecimal()


async def test_best_of(server: Server) -> None:
    parameters = {"max_new_tokens": 1, "best_of": 2, "do_sample": True, "details": True}
    parameters |= {"return_full_text": True}
    response = await server.client.post("/generate", json={"inputs": "n", "parameters": parameters})
    details = response.json()["details"]
    assert response.json()["generated_text"] == "nh"
    assert list(details)[-1] == "best_of_sequences"
    (loser,) = details["best_of_sequences"]
    assert loser["generated_text"] == "nh"
    assert list(loser) == ["generated_text", *list(details)[:-1]]
    assert loser["seed"] != details["seed"]
    assert server.services.metrics.request_count.value() == 1
    assert server.services.metrics.request_success.value() == 2


async def test_best_of_needs_a_permit_each(tmp_path: Path) -> None:
    async with serve(tmp_path, max_concurrent_requests=1) as server:
        request = {"inputs": "n", "parameters": {"best_of": 2, "do_sample": True}}
        response = await server.client.post("/generate", json=request)
        assert response.status_code == 429
        assert response.json() == {"error": "Model is overloaded", "error_type": "overloaded"}


@pytest.mark.parametrize("traceparent", ["", "junk", "00-0-0-0", "ff-1-2-3", "00-" + "a" * 9000])
async def test_traceparent_changes_nothing(server: Server, traceparent: str) -> None:
    request = {"inputs": "n", "parameters": {"max_new_tokens": 1}}
    headers = {"traceparent": traceparent}
    response = await server.client.post("/generate", json=request, headers=headers)
    assert response.text == '{"generated_text":"h"}'


@pytest.mark.parametrize(
    "path", ["/generate", "/generate_stream", "/info", "/nowhere", "/v1/messages"]
)
async def test_every_answer_has_an_id(
    server: Server, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caplog.handler.setFormatter(LineFormatter(json_output=False))
    method = "GET" if path == "/info" else "POST"

    async def id_of(given: str | None = None) -> str:
        headers = {} if given is None else {"x-request-id": given}
        body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
        answer = await server.client.request(method, path, json=body, headers=headers)
        assert answer.headers.get_list("request-id") == (
            answer.headers.get_list("x-request-id") if path == "/v1/messages" else []
        )
        [found] = answer.headers.get_list("x-request-id")
        return found

    assert await id_of("mine-1") == "mine-1"
    assert await id_of() != await id_of()
    for bad in ("", "two words", "x" * 129):
        assert await id_of(bad) not in ("", bad)
    told = [line for line in caplog.text.splitlines() if line.endswith(" id=mine-1")]
    assert told and all(f" route={path} " in line for line in told)
    assert any("Success total_time=" in line for line in told) == path.startswith("/generate")


@pytest.mark.parametrize("path", ["/", "/health", "/ping"])
async def test_health(server: Server, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    response = await server.client.get(path)
    assert (response.status_code, response.content) == (200, b"")
    assert (await server.client.head(path)).status_code == 200
    server.shards.failure = GenerationError("gone")
    response = await server.client.get(path)
    assert response.status_code == 503
    assert response.text == '{"error":"unhealthy","error_type":"healthcheck"}'
    server.shards.failure = None
    monkeypatch.setattr(info, "HEALTH_TIMEOUT_S", 0.05)
    server.shards.is_stuck = True
    assert (await server.client.get(path)).status_code == 503
    server.shards.is_stuck = False
    assert (await server.client.get(path)).status_code == 200


async def test_metrics(server: Server) -> None:
    await server.client.post("/generate", json={"inputs": "n", "parameters": {"max_new_tokens": 2}})
    await server.client.post("/generate", json={"inputs": ""})
    response = await server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    for line in (
        "tgi_request_count 2",
        "tgi_request_success 1",
        'tgi_request_failure{err="validation"} 1',
        "tgi_request_duration_count 1",
        "tgi_request_validation_duration_count 1",
        "tgi_request_queue_duration_count 1",
        "tgi_request_inference_duration_count 1",
        "tgi_request_mean_time_per_token_duration_count 1",
        "tgi_request_generated_tokens_sum 2",
        "tgi_request_input_length_sum 2",
        "tgi_request_max_new_tokens_sum 2",
    ):
        assert line in lines or line + ".0" in lines, line


async def test_docs_need_no_network(server: Server) -> None:
    for path in ("/docs", "/docs/"):
        page = await server.client.get(path, follow_redirects=True)
        assert "https://" not in page.text
        for asset in re.findall(r'(?:src|href)="([^"]+)"', page.text):
            assert (await server.client.get(asset)).status_code == 200
    schema = (await server.client.get("/api-doc/openapi.json")).json()
    assert schema["info"]["title"] == "Text Generation Inference"
    assert schema["info"]["license"]["name"] == "Apache 2.0"


OPEN_PATHS = {"/health", "/metrics", "/v2/health/live", "/v2/health/ready"}
OPEN_PATHS |= {"/v2/models/{model_name}/versions/{model_version}/ready"}
OPEN_PATHS |= {"/v2/models/{model_name}/ready", "/livez", "/readyz", "/startupz"}


async def test_every_route_but_health_and_metrics_asks_for_a_key(tmp_path: Path) -> None:
    async with serve(tmp_path, api_key=("Key",)) as server:
        headers = {"x-api-key": "Key"}
        schema = (await server.client.get("/api-doc/openapi.json", headers=headers)).json()
        assert schema["paths"].keys() > OPEN_PATHS
        for path, operations in schema["paths"].items():
            for method, operation in operations.items():
                response = await server.client.request(method, path)
                assert (response.status_code == 401) == (path not in OPEN_PATHS), path
                assert ("security" in operation) == (path not in OPEN_PATHS), path
        for path in ("/", "/ping"):
            assert (await server.client.get(path)).status_code == 200
        assert (await server.client.head("/info")).status_code == 401


@pytest.mark.parametrize(
    ("origins", "granted"), [((), "*"), (("https://a.example",), "https://a.example")]
)
async def test_cors(tmp_path: Path, origins: tuple[str, ...], granted: str) -> None:
    headers = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type, authorization, x-api-key",
    }
    async with serve(tmp_path, cors_allow_origin=origins) as server:
        response = await server.client.options("/generate", headers=headers)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == granted
        allowed = response.headers["access-control-allow-headers"]
        assert allowed == headers["access-control-request-headers"]
        response = await server.client.get("/info", headers={"origin": "https://b.example"})
        assert response.headers.get("access-control-allow-origin") == ("*" if not origins else None)


@pytest.mark.parametrize(("port", "status"), [(9000, 404), (3000, 200)])
async def test_metrics_port_serves_metrics_only(tmp_path: Path, port: int, status: int) -> None:
    services = assemble_scripted(tmp_path, prometheus_port=9000)
    app = create_app(services.config, services)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url=f"http://a:{port}", verify=False
    ) as client:
        assert (await client.get("/info")).status_code == status
        assert "tgi_request_count" in (await client.get("/metrics")).text


async def test_generation_failure(server: Server) -> None:
    server.shards.failure = GenerationError("Server error: out of memory")
    request = {"inputs": "n", "parameters": {"max_new_tokens": 5}}
    response = await server.client.post("/generate", json=request)
    assert response.status_code == 424
    assert response.json() == {
        "error": "Request failed during generation: Server error: out of memory",
        "error_type": "generation",
    }
    server.shards.failure = None
    stream = server.client.stream("POST", "/generate_stream", json={"inputs": "n"})
    server.shards.delay_s = 0.01
    async with stream as response:
        lines = response.aiter_lines()
        assert json.loads((await anext(lines))[5:])["index"] == 1
        server.shards.failure = GenerationError("Server error: late")
        *_, last, _ = [line async for line in lines]
    assert json.loads(last[5:])["error_type"] == "generation"
    assert server.services.metrics.request_failure.value(err="generation") == 2
    server.shards.failure = None


async def test_bug_is_an_internal_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Batcher, request: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(Batcher, "submit_many", broken)
    told = {
        "error": "The server failed on this request; its log says why",
        "error_type": "internal",
    }
    response = await server.client.post("/generate", json={"inputs": "n"})
    assert response.status_code == 500
    assert response.json() == told
    response = await server.client.post("/generate_stream", json={"inputs": "n"})
    assert response.status_code == 200
    assert json.loads(response.text[5:]) == told
    assert server.services.metrics.request_failure.value(err="generation") == 2
