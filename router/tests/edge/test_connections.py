"""Clients that leave, and clients that do not read."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from text_generation_router.edge.connection import ConnectionLimits

from router.tests.serving import Server, serve
from router.tests.talk import HEALTH, POST, Talk, asking, check_refusal, of_body, said


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    limits = ConnectionLimits(unread_s=0.2, tick_s=0.02)
    async with serve(tmp_path, limits=limits, max_concurrent_requests=2) as server:
        yield server


@pytest.mark.parametrize("path", ["/generate_stream", "/generate", "/health"])
async def test_answers_to_http_1_0_have_no_chunks(server: Server, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = json.dumps({"inputs": "n", "parameters": {"max_new_tokens": 3}}).encode()
    if path == "/health":
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
    else:
        head = f"POST {path} HTTP/1.0\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    head, _, rest = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
    writer.close()
    assert b" 200 OK" in head and b"chunked" not in head and b"connection: close" in head
    if path == "/generate_stream":
        events = [line for line in rest.splitlines() if line]
        assert len(events) == 3 and all(line.startswith(b"data: {") for line in events)
    elif path == "/generate":
        assert json.loads(rest) == {"generated_text": "hel"}


async def test_a_stream_has_begun_while_its_prompt_is_computed(server: Server) -> None:
    server.shards.delay_s = 0.3
    request = {"inputs": "n", "parameters": {"max_new_tokens": 1}}
    async with server.client.stream("POST", "/generate_stream", json=request) as response:
        assert response.status_code == 200
        assert not server.shards.rows
        assert (await response.aread()).startswith(b"data:")


async def test_an_upgrade_is_not_taken(server: Server) -> None:
    """And what follows such a head is its body, and no other request."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    request = of_body(asking(1), POST + upgrade)
    talk = await Talk.to(server, HEALTH + upgrade + b"\r\n" + request)
    assert (await talk.answer())[0] == 200
    for pieces in ([], [request], [request[:-20], request[-20:]]):
        for piece in pieces:
            talk.writer.write(piece)
            await asyncio.sleep(0.01)
        assert await talk.answer() == (200, b'{"generated_text":"h"}')
    talk.writer.write(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n")
    check_refusal(await talk.rest(), 405)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("connection", [b"Upgrade, close", b"close, upgrade", b"Upgrade"])
async def test_an_upgrade_of_a_last_request_is_not_taken(
    server: Server, connection: bytes, protocol: bytes, version: bytes
) -> None:
    """Whether its head or HTTP/1.0 says that the connection ends with the answer."""
    head = POST.replace(b"1.1", version) + b"Upgrade: %b\r\n" % protocol
    head += b"Connection: %b\r\n" % connection
    chunks = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (
        len(asking(1)),
        asking(1),
    )
    last = HEALTH + b"Connection: close\r\n\r\n" if head.endswith(b": Upgrade\r\n") else b""
    for request in (of_body(asking(1), head), head + chunks):
        answers = await said(server, request + last)
        assert answers.startswith(b"HTTP/1.1 200 "), answers
        assert b'{"generated_text":"h"}' in answers and b"\r\nconnection: close\r\n" in answers


async def test_a_request_behind_the_last_one_is_not_answered(server: Server) -> None:
    upgrade = b"Connection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n"
    talk = await Talk.to(server)
    for byte in HEALTH + upgrade:
        talk.writer.write(bytes([byte]))
        await talk.writer.drain()
    talk.writer.write(HEALTH + b"\r\n")
    assert (await talk.rest()).count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(("version", "is_told"), [(b"1.1", True), (b"1.0", False)])
async def test_continue_is_told_where_it_is_expected(
    server: Server, version: bytes, is_told: bool
) -> None:
    """Except in HTTP/1.0, which has no such answers."""
    head = POST.replace(b"1.1", version) + b"Connection: close\r\nExpect: 100-continue\r\n"
    answers = await said(server, of_body(asking(1), head))
    assert answers.startswith(b"HTTP/1.1 100 Continue\r\n\r\n") is is_told
    assert answers.endswith(b'{"generated_text":"h"}')
