"""How chunks of events leave, and what becomes of the events when they can not."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from itertools import pairwise

import pytest
from starlette.types import Message
from text_generation_router.api import sse
from text_generation_router.api.sse import DIRECT_SEND, EventStream

SCOPE = {"type": "http", "method": "POST"}


class Source:
    """Chunks to be sent; knows whether it was closed."""

    def __init__(self) -> None:
        self.chunks: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.is_closed = False

    async def events(self) -> AsyncGenerator[bytes]:
        try:
            while (chunk := await self.chunks.get()) is not None:
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
        finally:
            self.is_closed = True


class Client:
    """The far end: what it was sent and when; it reads no more than `appetite` messages."""

    def __init__(self, appetite: int = 1000) -> None:
        self.sent: list[Message] = []
        self.times: list[float] = []
        self.has_left = asyncio.Event()
        self._appetite = appetite

    async def send(self, message: Message) -> None:
        if len(self.sent) == self._appetite:
            await asyncio.Event().wait()
        self.sent.append(message)
        self.times.append(asyncio.get_running_loop().time())

    async def receive(self) -> Message:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    def bodies(self) -> list[tuple[bytes, bool]]:
        """The chunks, each with whether more was announced."""
        return [(m["body"], m["more_body"]) for m in self.sent if "body" in m]


def stream(source: Source, client: Client) -> "asyncio.Task[None]":
    response = EventStream(source.events(), {"x-a": "b"})
    return asyncio.create_task(response(SCOPE, client.receive, client.send))


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_true():
            await asyncio.sleep(0.002)


async def test_each_chunk_is_one_write() -> None:
    source, client = Source(), Client()
    for chunk in (b"a", b"b", None):
        source.chunks.put_nowait(chunk)
    await stream(source, client)
    assert client.bodies() == [(b"a", True), (b"b", True), (b"", False)]
    start = client.sent[0]
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert dict(start["headers"]) == {
        b"content-type": b"text/event-stream",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
        b"x-a": b"b",
    }
    assert source.is_closed


async def test_events_go_past_whatever_is_wrapped_around_the_start() -> None:
    source, client, direct = Source(), Client(), Client()
    source.chunks.put_nowait(b"a")
    source.chunks.put_nowait(None)
    scope = {**SCOPE, DIRECT_SEND: direct.send}
    await EventStream(source.events(), {})(scope, client.receive, client.send)
    assert [message["type"] for message in client.sent] == ["http.response.start"]
    assert direct.bodies() == [(b"a", True), (b"", False)]


async def test_client_leaves() -> None:
    source, client = Source(), Client()
    source.chunks.put_nowait(b"a")
    response = stream(source, client)
    await until(lambda: len(client.sent) == 2)
    client.has_left.set()
    await response
    assert source.is_closed
    assert client.bodies() == [(b"a", True)]


async def test_events_that_fail() -> None:
    source, client = Source(), Client()
    source.chunks.put_nowait(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await stream(source, client)
    assert source.is_closed


@pytest.mark.parametrize("turns", [0, 1, 2, 9])
async def test_server_ends_it(turns: int) -> None:
    source, client = Source(), Client()
    events = source.events()
    first = asyncio.create_task(anext(events))
    source.chunks.put_nowait(b"a")
    assert await first == b"a"
    response = asyncio.create_task(EventStream(events, {})(SCOPE, client.receive, client.send))
    await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    response.cancel()
    with pytest.raises(asyncio.CancelledError):
        await response
    assert source.is_closed


async def test_comments_break_the_silence_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.4)
    source, client = Source(), Client()
    response = stream(source, client)
    for _ in range(20):
        source.chunks.put_nowait(b"a")
        await asyncio.sleep(0.01)
    num_sent = len(client.sent)
    await until(lambda: len(client.sent) == num_sent + 2)
    source.chunks.put_nowait(None)
    await response
    bodies = [body for body, _ in client.bodies()]
    assert bodies.count(b"a") == 20 and set(bodies[20:]) == {sse.COMMENT, b""}
    gaps = [later - sooner for sooner, later in pairwise(client.times)]
    of_comments = [
        gap for gap, message in zip(gaps, client.sent[1:], strict=True) if is_comment(message)
    ]
    assert min(of_comments) > 0.35


def is_comment(message: Message) -> bool:
    return message.get("body") == sse.COMMENT


async def test_client_that_does_not_read_gets_no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a write is under way; its connection is cut off, which it hears as any other end."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    source, client = Source(), Client(appetite=1)
    source.chunks.put_nowait(b"a")
    response = stream(source, client)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(response), 0.05)
    client.has_left.set()
    await response
    assert source.is_closed
    assert len(client.sent) == 1
