"""Bodies that are no request: status, sentence, and never more memory than the limit."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.tests.serving import Server, serve

JSON = {"content-type": "application/json"}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serve(tmp_path) as server:
        yield server


# Beside those of integration_tests/test_bad_input.py.
BAD_BODIES = [
    (JSON, '{"inputs": "n"}'.encode("utf-16"), 400, "it is not valid UTF-8; send it as UTF-8"),
    (JSON, b'{"inputs": "x", "parameters": {"top_p": Infinity}}', 400, "unexpected"),
    (JSON, b'{"inputs": ' + b"[" * 250 + b"]" * 250 + b"}", 400, "nested deeper"),
    (JSON, b'{"inputs": ' + b"[" * 239 + b"]" * 239 + b"}", 422, "`inputs`"),
    (JSON, b'{"inputs": "x", "parameters": {"temperature": 1e400}}', 422, "number out of range"),
    (JSON, b'{"inputs": "x", "parameters": {"temperature": 1e-320}}', 422, "strictly positive"),
    (JSON, b'{"inputs": "x", "parameters": {"seed": 1e9}}', 422, "`parameters.seed`"),
    (JSON, b'{"inputs": "x", "parameters": {"stop": ["a", 1]}}', 422, "`parameters.stop.1`"),
    (JSON, b'{"inputs": 7}', 422, "`inputs`: Input should be a valid string. Given: 7"),
    (JSON, b'{"input": "x"}', 422, "`inputs`: Field required"),
    ({}, b'{"inputs": "x"}', 415, "Expected request with `Content-Type: application/json`"),
    ({"content-type": "text/plain"}, b'{"inputs": "x"}', 415, "Content-Type"),
    ({"content-type": "application/jsonx"}, b'{"inputs": "x"}', 415, "Content-Type"),
]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/tokenize"])
async def test_bad_bodies(server: Server, path: str) -> None:
    for headers, content, status, words in BAD_BODIES:
        if path == "/tokenize" and words == "strictly positive":
            continue
        response = await server.client.post(path, content=content, headers=headers)
        if path == "/generate_stream" and words == "strictly positive":
            assert response.status_code == 200 and words in response.text
            continue
        assert response.status_code == status, content
        assert response.json()["error_type"] == "validation"
        assert words in response.json()["error"]
        assert "\n" not in response.json()["error"] and len(response.json()["error"]) < 300


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "APPLICATION/JSON; charset=utf-8", "application/vnd.api+json"],
)
async def test_json_content_types(server: Server, content_type: str) -> None:
    content = b'{"inputs": "a\\u0000b", "unknown": {"a": 1}, "parameters": {"max_new_tokens": 1}}'
    headers = {"content-type": content_type}
    response = await server.client.post("/generate", content=content, headers=headers)
    assert response.json() == {"generated_text": "h"}


async def test_a_byte_order_mark_is_no_part_of_the_text(server: Server) -> None:
    """As editors and shells of Windows write it into a file that is sent."""
    for path, field in (("/generate", "inputs"), ("/v1/completions", "prompt")):
        content = json.dumps({field: "n", "max_tokens": 1}).encode("utf-8-sig")
        response = await server.client.post(path, content=content, headers=JSON)
        assert response.status_code == 200, response.text


async def test_large_bodies(server: Server) -> None:
    content = b'{"inputs": "' + b"x" * 10_000_000 + b'"}'

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 500_000):
            yield content[start : start + 500_000]

    for sent in (content, chunks()):
        response = await server.client.post("/generate", content=sent, headers=JSON)
        assert response.status_code == 413
        assert response.json()["error_type"] == "validation"
        assert "2000000 bytes" in response.json()["error"]
    response = await server.client.post("/generate", content=content[:99_000] + b'"}', headers=JSON)
    assert response.status_code == 422
    assert "`inputs` tokens + `max_new_tokens` must be <= 4096" in response.json()["error"]


async def test_a_declared_length_above_the_limit_is_refused_unread(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = "POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {10**12}\r\n\r\n{{}}".encode())
    assert b" 413 " in await reader.readline()
    writer.close()


async def test_refused_bodies_do_not_wait_for_the_garbage_collector(server: Server) -> None:
    spaces = b" " * 500_000
    bodies = {
        b'{"inputs": "n"' + spaces: 400,
        b'{"inputs": {"a": "n"}}' + spaces: 422,
        b'{"inputs": "n"}' + spaces * 4: 413,
    }

    async def ask_all() -> None:
        for content, status in bodies.items():
            response = await server.client.post("/generate", content=content, headers=JSON)
            assert response.status_code == status

    await ask_all()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(5):
            await ask_all()
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert left < 1_000_000
