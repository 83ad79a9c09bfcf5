"""The routes of a running server: bodies to the byte, headers, statuses."""

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from text_generation_process.log import LineFormatter
from text_generation_router.api.tgi import info
from text_generation_router.app import create_app
from text_generation_router.errors import GenerationError
from text_generation_router.request_options import request_fields
from text_generation_router.scheduler.batcher import Batcher

from router.tests.serving import Server, assemble_scripted, serve


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serve(tmp_path, "hé!") as server:
        yield server


@pytest.mark.parametrize(
    "path", ["/generate", "/generate_stream", "/info", "/nowhere", "/v1/messages"]
)
async def test_every_answer_has_an_id(
    server: Server, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caplog.handler.setFormatter(LineFormatter(False, request_fields))
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


async def test_only_the_named_origins_are_granted(tmp_path: Path) -> None:
    async with serve(tmp_path, cors_allow_origin=("https://a.example",)) as server:
        for origin, granted in (("https://a.example", "https://a.example"), ("https://b", None)):
            response = await server.client.get("/info", headers={"origin": origin})
            assert response.headers.get("access-control-allow-origin") == granted


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
