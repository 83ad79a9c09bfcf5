"""Row 4 of issue 17, and the connections of row 5: clients that send or read too little or much.

The attacks are bounded: some hundred connections, some hundred megabytes through the loopback.
"""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import psutil
import pytest

from integration_tests.hostile.contained import contained
from integration_tests.hostile.neighbours import neighbours
from integration_tests.server import LauncherHandle

pytestmark = pytest.mark.timed

MORE_BYTES = 100_000_000
KEY = "the-key"
# The data of a refused request that the server drops, and the sockets' buffers.
MOST_SENT = 40_000_000
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n"
POST = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
# 30 s, a check every second, and a busy machine.
IN_TIME_S = 34.0


def refused(handle: LauncherHandle, reason: str) -> float:
    return handle.metrics()[f'tgi_connections_refused{{reason="{reason}"}}']


@contextmanager
def bounded_router(handle: LauncherHandle) -> Iterator[Callable[[], None]]:
    """Asserts at each call and at the end that the router has not grown by `MORE_BYTES`."""
    router = psutil.Process(handle.child("text-generation-router").pid)
    before = router.memory_info().rss

    def check() -> None:
        grown = router.memory_info().rss - before
        assert grown < MORE_BYTES, f"the router has grown by {grown / 1e6:.0f} MB"

    yield check
    check()


class Attacker:
    """One connection; records its answer and how long it was open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self.began = time.monotonic()

    async def send(self, data: bytes) -> bool:
        """Waits until the data is sent; False if the server does not read any more."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except OSError:
            return False
        return not self.writer.is_closing()

    async def told(self, most: int = 100_000) -> bytes:
        """The data until the server closes; an OSError counts as the end."""
        answer = b""
        try:
            while len(answer) < most and (piece := await self._reader.read(4096)):
                answer += piece
        except OSError:
            pass
        return answer

    async def kept_s(self) -> float:
        """How long it took the server to close."""
        await self.told()
        return time.monotonic() - self.began


@asynccontextmanager
async def attackers(
    handle: LauncherHandle, count: int, receive_bytes: int = 65536
) -> AsyncIterator[list[Attacker]]:
    """`count` connections, closed at the end without a request."""
    found = []
    try:
        for _ in range(count):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", handle.port))
            found.append(Attacker(*await asyncio.open_connection(sock=client)))
        yield found
    finally:
        for attacker in found:
            attacker.writer.transport.abort()


def attack(
    handle: LauncherHandle,
    doing: Callable[[LauncherHandle, Callable[[], None]], Awaitable[None]],
    key: str = "",
) -> None:
    """Runs it together with honest clients, who must not notice; the router's memory is bounded."""
    with neighbours(handle, key) as seen, bounded_router(handle) as check:
        asyncio.run(doing(handle, check))
    seen.assert_unharmed()


def test_headers_without_end(hostile_server: LauncherHandle) -> None:
    async def send(handle: LauncherHandle, check: Callable[[], None]) -> None:
        async with attackers(handle, 20) as all_of_them:
            for attacker in all_of_them:
                await attacker.send(HEALTH + b"a: ")
                sent = 0
                while sent < MOST_SENT and await attacker.send(b"b" * 200_000):
                    sent += 200_000
                assert sent < MOST_SENT
                check()

    before = refused(hostile_server, "head_size")
    attack(hostile_server, send)
    assert refused(hostile_server, "head_size") == before + 20


def test_bodies_that_are_never_finished(hostile_server: LauncherHandle) -> None:
    async def send(handle: LauncherHandle, check: Callable[[], None]) -> None:
        async with attackers(handle, 200) as all_of_them:
            answers = []
            for attacker in all_of_them:
                await attacker.send(POST + b"Content-Length: 1800000\r\n\r\n" + b" " * 1_700_000)
                answers.append(asyncio.create_task(attacker.told()))
                check()
                await asyncio.sleep(0.02)
            told = [task.result() for task in answers if task.done()]
            assert len(told) > 120
            assert all(b" 503 " in answer and b"retry-after: 1" in answer for answer in told)
            for task in answers:
                task.cancel()

    before = refused(hostile_server, "bodies")
    attack(hostile_server, send)
    assert refused(hostile_server, "bodies") > before + 120


def test_the_key_is_looked_at_before_the_body() -> None:
    async def send(handle: LauncherHandle, check: Callable[[], None]) -> None:
        async with attackers(handle, 100) as all_of_them:
            for attacker in all_of_them:
                await attacker.send(POST + b"Content-Length: 1800000\r\n\r\n" + b" " * 1_700_000)
                await asyncio.sleep(0.02)
            check()
            for attacker in all_of_them:
                assert b" 401 " in await attacker.told(100)
            began = time.monotonic()
            await asyncio.gather(*(attacker.told() for attacker in all_of_them))
            assert time.monotonic() - began < IN_TIME_S / 2

    with contained(None, "--api-key", KEY) as handle:
        attack(handle, send, KEY)
        headers = {"Authorization": f"Bearer {KEY}"}
        assert handle.client.post("/generate", json={"inputs": "a"}, headers=headers).is_success


def test_whoever_waits_is_closed_in_time(hostile_server: LauncherHandle) -> None:
    """Missing, incomplete and slow heads, slow bodies, and answers that no client reads."""

    async def wait(handle: LauncherHandle, check: Callable[[], None]) -> None:
        async with (
            attackers(handle, 500) as silent,
            attackers(handle, 100) as heads,
            attackers(handle, 100) as bodies,
            attackers(handle, 12, 4096) as readers,
        ):
            for attacker in heads:
                await attacker.send(HEALTH)
            for attacker in bodies:
                await attacker.send(POST + b"Content-Length: 100000\r\n\r\n{")
            await ask_without_reading(readers)
            dripping = asyncio.create_task(drip([*heads, *bodies]))
            check()
            kept = await asyncio.gather(*(attacker.kept_s() for attacker in (*silent, *heads)))
            assert max(kept) < IN_TIME_S
            assert min(kept) > 25
            kept = await asyncio.gather(*(attacker.kept_s() for attacker in bodies))
            assert max(kept) < IN_TIME_S
            while refused(handle, "unread") < before["unread"] + len(readers):
                check()
                await asyncio.sleep(0.5)
                assert time.monotonic() - readers[0].began < 2 * IN_TIME_S
            dripping.cancel()

    counts = {"silent": 500, "head_time": 100, "body_rate": 100, "unread": 12}
    before = {reason: refused(hostile_server, reason) for reason in counts}
    attack(hostile_server, wait)
    after = {reason: refused(hostile_server, reason) - before[reason] for reason in counts}
    assert after == counts
    assert hostile_server.log.count("A client read nothing for 30 s") == 12


async def ask_without_reading(readers: list[Attacker]) -> None:
    """Large answers one after the other on each connection, more than systems keep for a client."""
    body = json.dumps({"inputs": "What is it? " * 1000}).encode()
    head = POST.replace(b"/generate", b"/tokenize") + b"Content-Length: %d\r\n\r\n" % len(body)
    script = b"GET /static-offline-docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: a\r\n\r\n"
    for reader in readers:
        reader.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await reader.send(head + body + script * 6)
        await asyncio.sleep(0.2)


async def drip(all_of_them: list[Attacker]) -> None:
    """One byte per second from each."""
    while True:
        for attacker in all_of_them:
            if not attacker.writer.is_closing():
                await attacker.send(b"a")
        await asyncio.sleep(1)
