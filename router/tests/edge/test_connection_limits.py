"""Limits of a connection: sizes, times, and what must be read. With raw bytes."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from text_generation_router import server as server_module
from text_generation_router.edge.connection import ConnectionLimits

from router.tests.serving import Server, serve
from router.tests.talk import (
    HEALTH,
    PATIENCE_S,
    POST,
    Talk,
    asking,
    check_refusal,
    of_body,
    said,
)

LIMITS = ConnectionLimits(
    head_s=0.3,
    body_grace_s=0.2,
    body_bytes_per_s=1000,
    all_bodies_bytes=400_000,
    unread_s=0.3,
    leftover_s=0.3,
    leftover_bytes=1_000_000,
    tick_s=0.02,
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serve(tmp_path, limits=LIMITS) as server:
        yield server


def refused(server: Server, reason: str) -> int:
    return server.services.metrics.connections_refused.value(reason=reason)


async def test_heads_that_are_too_large(server: Server) -> None:
    heads = [
        HEALTH + b"a: b\r\n" * 101 + b"\r\n",
        HEALTH + b"a: " + b"b" * 70_000 + b"\r\n\r\n",
        HEALTH + (b"a: " + b"b" * 1000 + b"\r\n") * 66 + b"\r\n",
        b"GET /health?" + b"b" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        HEALTH + b"a: " + b"b" * 70_000,
        HEALTH + b"b" * 70_000,
        b"GET /" + b"b" * 70_000,
        b"\r\n" * 40_000,
    ]
    for head in heads:
        sentence = check_refusal(await said(server, head), 431)
        assert "at most 65536 bytes and 100 headers" in sentence
    assert refused(server, "head_size") == len(heads)


async def test_heads_within_the_limits(server: Server) -> None:
    """Neither where a piece ends nor what follows in it counts."""
    for more in (b"a: b\r\n" * 98, (b"a: " + b"b" * 1000 + b"\r\n") * 60, b"a: " + b"b" * 60_000):
        talk = await Talk.to(server)
        for end in (b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"):
            head = HEALTH + more.removesuffix(b"\r\n")
            talk.writer.write(head[:50_000])
            await asyncio.sleep(0)
            talk.writer.write(head[50_000:] + end)
            assert (await talk.answer())[0] == 200
        assert await talk.rest() == b""


async def is_cut_off(talk: Talk) -> None:
    """A client that keeps sending is disconnected."""
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            while True:
                talk.writer.write(b" " * 100_000)
                await talk.writer.drain()
                await asyncio.sleep(0)
    talk.writer.close()


async def test_trailers_are_no_headers_and_have_the_same_limit(server: Server) -> None:
    key = b"Transfer-Encoding: chunked\r\n\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(asking(1)), asking(1))
    talk = await Talk.to(server, POST + key + chunks + b"Content-Type: text/plain\r\n\r\n")
    assert (await talk.answer())[0] == 200
    talk.writer.write(POST + key + b"5\r\n{    \r\n0\r\na: " + b"b" * 400_000)
    check_refusal(await talk.rest(), 431)


HOSTS = [
    (b"GET /health HTTP/1.1\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: a\r\n", 400),
    (b"GET /health HTTP/1.0\r\nHost: a\r\nHost: b\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a b\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a/b\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: b@a\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a:b\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: \xff\r\n", 400),
    (b"GET /health HTTP/2.0\r\nHost: a\r\n", 400),
    (b"GET /health HTTP/0.9\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost:\r\n", 200),
    (b"GET /health HTTP/1.1\r\nHost: [::1]:3000\r\n", 200),
    (b"GET /health HTTP/1.1\r\nHost: a-b_c.example:80\r\n", 200),
    (b"GET /health HTTP/1.0\r\n", 200),
]


async def test_hosts_and_versions(server: Server) -> None:
    for head, status in HOSTS:
        answer = await said(server, head + b"Connection: close\r\n\r\n")
        if status == 200:
            assert answer.startswith(b"HTTP/1.1 200 "), answer
        else:
            check_refusal(answer, status)
    assert refused(server, "malformed") == sum(status == 400 for _, status in HOSTS)


CHUNKED = b"Transfer-Encoding: chunked\r\n"
SMUGGLED = {
    "both lengths": CHUNKED + b"Content-Length: 4\r\n\r\n0\r\n\r\n",
    "both lengths, turned": b"Content-Length: 4\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
    "one length twice": b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": b"Content-Length: 2, 2\r\n\r\n{}",
    "a length with a sign": b"Content-Length: +2\r\n\r\n{}",
    "a negative length": b"Content-Length: -2\r\n\r\n{}",
    "a hexadecimal length": b"Content-Length: 0x2\r\n\r\n{}",
    "an empty length": b"Content-Length: \r\n\r\n{}",
    "a length beyond 64 bits": b"Content-Length: 18446744073709551618\r\n\r\n{}",
    "another coding last": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "an unknown coding": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked twice": CHUNKED + CHUNKED + b"\r\n0\r\n\r\n",
    "a space before the colon": b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a chunk size that is none": CHUNKED + b"\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a negative chunk size": CHUNKED + b"\r\n-1\r\n{}\r\n0\r\n\r\n",
    "a chunk size with 0x": CHUNKED + b"\r\n0x2\r\n{}\r\n0\r\n\r\n",
    "a chunk size beyond 64 bits": CHUNKED + b"\r\n10000000000000002\r\n{}\r\n0\r\n\r\n",
    "a chunk longer than its size": CHUNKED + b"\r\n2\r\n{}X\r\n0\r\n\r\n",
    "chunks with bare LF": CHUNKED + b"\r\n2\n{}\n0\n\n",
    "a folded header": b"A: b\r\n c\r\nContent-Length: 2\r\n\r\n{}",
    "a header with bare LF": b"A: b\nContent-Length: 2\r\n\r\n{}",
    "a header with bare CR": b"A: b\rContent-Length: 2\r\n\r\n{}",
    "a header with NUL": b"A: b\0c\r\nContent-Length: 2\r\n\r\n{}",
    "a header without a name": b": b\r\nContent-Length: 2\r\n\r\n{}",
}


async def test_smuggled_requests_are_not_answered(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the first request is, with a refusal."""
    caplog.set_level(logging.WARNING)
    for name, rest in SMUGGLED.items():
        answer = await said(server, POST + rest + HEALTH + b"\r\n")
        assert answer.count(b"HTTP/1.1 ") == 1, name
        check_refusal(answer, 400)
    assert refused(server, "malformed") == len(SMUGGLED)
    assert not caplog.text


async def test_heads_that_do_not_come(server: Server) -> None:
    half = await Talk.to(server, HEALTH + b"a")
    drips = await Talk.to(server, HEALTH + b"a: ")
    again = await Talk.to(server, HEALTH + b"\r\n")
    assert (await again.answer())[0] == 200
    again.writer.write(b"G")
    dripping = asyncio.create_task(drip(drips, b"b"))
    for talk in (half, drips, again):
        assert "within 0.3 s" in check_refusal(await talk.rest(), 408)
    dripping.cancel()
    assert refused(server, "head_time") == 3


async def drip(talk: Talk, piece: bytes) -> None:
    while True:
        talk.writer.write(piece)
        await asyncio.sleep(0.02)


async def test_an_idle_connection_is_kept_after_an_answer(server: Server) -> None:
    """Also one with a line too many behind its body, which must not count as a head."""
    server.shards.delay_s = 0.03
    talk = await Talk.to(server, of_body(asking(12)) + b"\r\n")
    for _ in range(2):
        assert (await talk.answer())[0] == 200
        # Until one that began later is closed for its silence.
        assert await said(server, b"") == b""
        talk.writer.write(HEALTH + b"\r\n")
    assert (await talk.answer())[0] == 200
    talk.writer.close()
    assert refused(server, "head_time") == 0


async def test_a_head_that_waits_behind_an_answer_has_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And uvicorn's timer for idle connections leaves its request alone."""
    monkeypatch.setattr(server_module, "KEEP_ALIVE_S", 0.2)
    async with serve(tmp_path, limits=replace(LIMITS, head_s=1.0)) as server:
        server.shards.delay_s = 0.05
        second = of_body(asking(12))
        talk = await Talk.to(server, of_body(asking(4)) + second[:30])
        assert (await talk.answer())[0] == 200
        talk.writer.write(second[30:])
        assert (await talk.answer())[0] == 200
        assert await talk.rest() == b""


async def test_bodies_that_come_too_slowly(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    head = POST + b"Content-Length: 10000\r\n\r\n"
    hanging = await Talk.to(server, head + b"{")
    dripping = await Talk.to(server, head)
    drops = asyncio.create_task(drip(dripping, b" "))
    for talk in (hanging, dripping):
        assert "at least 1000 bytes a second" in check_refusal(await talk.rest(), 408)
    drops.cancel()
    assert refused(server, "body_rate") == 2
    assert not caplog.text


async def test_bodies_that_come_slowly_enough(server: Server) -> None:
    body = asking(1) + b" " * 5000
    whole = of_body(body)
    talk = await Talk.to(server)
    for start in range(0, len(whole), 300):
        talk.writer.write(whole[start : start + 300])
        await asyncio.sleep(0.03)
    assert (await talk.answer())[0] == 200
    talk.writer.close()


async def test_all_unfinished_bodies_together(tmp_path: Path) -> None:
    """The oldest are refused; small requests, and large ones that arrive quickly, are served."""
    async with serve(tmp_path, limits=replace(LIMITS, body_grace_s=60)) as server:
        head = POST + b"Content-Length: 200000\r\n\r\n"
        talks = [await Talk.to(server, head + b" " * 90_000) for _ in range(8)]
        for talk in talks[:4]:
            answer = await talk.rest()
            check_refusal(answer, 503)
            assert b"\r\nretry-after: 1\r\n" in answer
        for body in (asking(1), asking(1) + b" " * 300_000):
            talk = await Talk.to(server, of_body(body))
            assert (await talk.answer())[0] == 200
            talk.writer.close()
        for talk in talks:
            talk.writer.close()


async def test_without_a_key_the_body_is_thrown_away(tmp_path: Path) -> None:
    async with serve(tmp_path, limits=LIMITS, api_key=("k",)) as server:
        short = await Talk.to(server, of_body(b" " * 300_000))
        assert (await short.answer())[0] == 401
        short.writer.write(HEALTH + b"\r\n")
        assert (await short.answer())[0] == 200
        short.writer.close()
        hanging = await Talk.to(server, POST + b"Content-Length: 1000000\r\n\r\n" + b" " * 90_000)
        assert (await hanging.answer())[0] == 401
        assert await hanging.rest() == b""
        await is_cut_off(await Talk.to(server, POST + b"Content-Length: 1000000000000\r\n\r\n"))
        assert refused(server, "leftover") == 2
        assert refused(server, "bodies") == 0


async def test_slow_readers_get_all_of_it(server: Server) -> None:
    body = json.dumps({"inputs": "n" * 3000}).encode()
    expected = (await server.client.post("/tokenize", content=body, headers=JSON)).content
    assert len(expected) > 130_000
    head = POST.replace(b"/generate", b"/tokenize") + b"Connection: close\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", server.port))
        await loop.sock_sendall(client, of_body(body, head))
        answer = b""
        while piece := await loop.sock_recv(client, 4096):
            answer += piece
            await asyncio.sleep(0.005)
    _, _, chunks = answer.partition(b"\r\n\r\n")
    content = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        content, chunks = content + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    assert content == expected
    assert refused(server, "unread") == 0


JSON = {"content-type": "application/json"}


async def test_pipelined_requests_are_answered_in_order_up_to_a_number(server: Server) -> None:
    request = HEALTH + b"\r\n"
    talk = await Talk.to(server, request * 5)
    for _ in range(5):
        assert (await talk.answer())[0] == 200
    talk.writer.write(of_body(asking(3)) + request * 1000)
    answers = await talk.rest()
    assert answers.count(b"HTTP/1.1 200 ") == 1 + LIMITS.num_pipelined
    assert answers.count(b"connection: close") == 1
    assert refused(server, "pipelined") == 1


def test_limits_follow_the_payload_limit() -> None:
    assert ConnectionLimits.of(1) == ConnectionLimits()
    large = ConnectionLimits.of(100_000_000)
    assert (large.all_bodies_bytes, large.leftover_bytes) == (1_600_000_000, 800_000_000)


async def test_garbage_behind_a_request_does_not_touch_its_answer(server: Server) -> None:
    server.shards.delay_s = 0.02
    answers = await said(server, of_body(asking(30)) + b"no such thing\r\n\r\n")
    assert answers.count(b"HTTP/1.1") == 1
    assert json.loads(answers.partition(b"\r\n\r\n")[2]) == {"generated_text": "hello " * 5}
