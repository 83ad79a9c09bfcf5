"""Long answers of /tokenize and /chat_tokenize: piece by piece, the same bytes, bounded."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import orjson
import pytest
from text_generation_router.edge.connection import ConnectionLimits

from router.tests.chats import serve_chat
from router.tests.serving import Server, serve
from router.tests.waiting import until

TEXT = "naïve 日本語 😀 \x00 cafe! " * 300


def expected(text: str, first: list[dict[str, Any]], ids: list[int]) -> bytes:
    """One token a byte; each has the character that its byte is of."""
    tokens, start = list(first), 0
    for character in text:
        stop = start + len(character.encode())
        tokens += [{"id": 0, "text": character, "start": start, "stop": stop}] * (stop - start)
        start = stop
    return orjson.dumps([token | {"id": i} for token, i in zip(tokens, ids, strict=True)])


async def test_long_texts(tmp_path: Path) -> None:
    bos = [{"id": 256, "text": "", "start": 0, "stop": 0}]
    async with serve_chat(tmp_path, "x") as server:
        for text in (TEXT, "x" * 5000, "x" * 2047, "x" * 2048):
            response = await server.client.post("/tokenize", json={"inputs": text})
            assert response.status_code == 200
            assert ("content-length" in response.headers) == (len(text) == 2047)
            assert response.headers["content-type"] == "application/json"
            ids = [token["id"] for token in response.json()]
            assert response.content == expected(text, bos, ids)
        chat = {"messages": [{"role": "user", "content": TEXT}]}
        response = await server.client.post("/chat_tokenize", json=chat)
        answer = response.json()
        text = f"<user>{TEXT}<assistant>"
        tokens = expected(text, [], [token["id"] for token in answer["tokenize_response"]])
        whole = b'{"tokenize_response":%b,"templated_text":%b}' % (tokens, orjson.dumps(text))
        assert response.content == whole
        assert server.services.long_answers.num_taken == 0


ROUTES = {
    "/tokenize": {"inputs": "a"},
    "/chat_tokenize": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/messages/count_tokens": {"model": "tgi", "messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_permits(tmp_path: Path, path: str) -> None:
    async with serve_chat(tmp_path, "x", max_concurrent_requests=2) as server:
        with server.services.infer.admitted(2):
            response = await server.client.post(path, json=ROUTES[path])
            assert response.status_code == 429
            assert "Model is overloaded" in response.text
        assert (await server.client.post(path, json=ROUTES[path])).status_code == 200


async def _asked(server: Server) -> socket.socket:
    """A client that does not read its long answer, which has begun."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", server.port))
    body = json.dumps({"inputs": "x" * 50_000}).encode()
    head = (
        "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    await loop.sock_sendall(client, head.encode() + body)
    await loop.sock_recv(client, 12)
    return client


async def test_clients_that_do_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(tmp_path, limits=ConnectionLimits(unread_s=0.3, tick_s=0.05)) as server:
        room = server.services.long_answers
        monkeypatch.setattr(room, "_num_bytes", 1_000_000)
        client = await _asked(server)
        held = room.num_taken
        # Bytes of ids, places and lengths, and the text.
        assert 50_000 * 4 < held <= 50_000 * 13 + 20
        monkeypatch.setattr(room, "_num_bytes", held)
        response = await server.client.post("/tokenize", json={"inputs": "x" * 50_000})
        assert response.status_code == 429
        assert (await server.client.post("/tokenize", json={"inputs": "x"})).status_code == 200
        await until(lambda: room.num_taken == 0)
        client.close()


async def test_a_client_that_leaves_its_long_answer(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        leaver = await _asked(server)
        assert server.services.long_answers.num_taken
        leaver.close()
        await until(lambda: server.services.long_answers.num_taken == 0)
