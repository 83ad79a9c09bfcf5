"""How chunks of events leave, and what becomes of the events when they can not."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.types import Message
from text_generation_router.api import answers
from text_generation_router.api.answers import EventStream, event
from text_generation_router.edge.front import STREAM, in_pieces
from text_generation_router.errors import GenerationError

from router.tests.chats import serve_chat
from router.tests.serving import serve
from router.tests.virtual_time import VirtualTime
from router.tests.waiting import until

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


def failed(error: Exception) -> bytes:
    return str(error).encode()


def stream(source: Source, client: Client) -> "asyncio.Task[None]":
    response = EventStream(source.events(), {"x-a": "b"}, failed)
    return asyncio.create_task(response(SCOPE, client.receive, client.send))


LINE_ENDS = "".join(map(chr, (0xB, 0xC, 0xD, *range(0x1C, 0x1F), 0x85, 0x2028, 0x2029)))
TEXT = f"“\\{LINE_ENDS}中\n"


async def test_nothing_in_an_event_ends_a_line() -> None:
    """In none of the chunks, and not in an error; `huggingface_hub` reads lines as Python does."""
    source, client = Source(), Client()
    events = [event({"text": character}) for character in TEXT]
    response = EventStream(source.events(), {}, lambda error: event({"text": str(error)}), b"", b"")
    first = EventStream(source.events(), {}, failed, first=event({"text": TEXT}))
    for chunk in (b"".join(events), GenerationError(TEXT), None, None):
        source.chunks.put_nowait(chunk)
    await response(SCOPE, client.receive, client.send)
    await first(SCOPE, client.receive, client.send)
    text = b"".join(body for body, _ in client.bodies()).decode()
    lines = [line for line in text.splitlines() if line]
    told = [orjson.loads(line.removeprefix("data: "))["text"] for line in lines]
    assert told == [*TEXT, str(GenerationError(TEXT)), TEXT]
    assert "\\u2028" in text and "“" in text and "中" in text


MESSAGES = {"messages": [{"role": "user", "content": "n"}], "max_tokens": 40, "stream": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate_stream", {"inputs": "n", "parameters": {"max_new_tokens": 40}}),
        ("/invocations", {"inputs": "n", "parameters": {"max_new_tokens": 40}, "stream": True}),
        ("/v1/completions", {"prompt": "n", "max_tokens": 40, "stream": True}),
        ("/v1/chat/completions", MESSAGES),
        ("/v1/messages", MESSAGES | {"model": "m"}),
        ("/v1/responses", {"input": "n", "max_output_tokens": 40, "stream": True}),
    ],
)
async def test_no_dialect_ends_a_line_inside_an_event(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    (tmp_path / "chat_template.jinja").write_text("n")
    async with (
        serve(tmp_path, f"a{TEXT}z") as server,
        server.client.stream("POST", path, json=body) as response,
    ):
        lines = [line async for line in response.aiter_lines()]
    assert "\\u2029" in "".join(lines)
    for line in lines:
        assert not line or line.startswith((":", "event: ", "data: {", "data: [DONE]")), line


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
    send = in_pieces(client.send, direct.send)
    scope = {**SCOPE, "extensions": {STREAM: {}}}
    await EventStream(source.events(), {}, failed)(scope, client.receive, send)
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


@pytest.mark.parametrize("error", [ZeroDivisionError("bug"), GenerationError("busy")])
async def test_events_that_fail(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    source, client = Source(), Client()
    for chunk in (b"a", error, b"never"):
        source.chunks.put_nowait(chunk)
    await stream(source, client)
    assert client.bodies() == [(b"a", True), (failed(error), True), (b"", False)]
    assert source.is_closed
    assert ("bug in the router" in caplog.text) == isinstance(error, ZeroDivisionError)


async def test_a_write_that_fails_is_no_failure_of_the_events() -> None:
    source, client = Source(), Client()

    async def send(message: Message) -> None:
        if "body" in message:
            raise ZeroDivisionError
        await client.send(message)

    source.chunks.put_nowait(b"a")
    with pytest.raises(ZeroDivisionError):
        await EventStream(source.events(), {}, failed)(SCOPE, client.receive, send)
    assert source.is_closed
    assert client.bodies() == []


@pytest.mark.parametrize("turns", [0, 1, 2, 9])
async def test_server_ends_it(turns: int) -> None:
    source, client = Source(), Client()
    events = source.events()
    first = asyncio.create_task(anext(events))
    source.chunks.put_nowait(b"a")
    assert await first == b"a"
    ended = EventStream(events, {}, failed)
    response = asyncio.create_task(ended(SCOPE, client.receive, client.send))
    await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    response.cancel()
    with pytest.raises(asyncio.CancelledError):
        await response
    assert source.is_closed


async def test_comments_break_the_silence_only(clock: VirtualTime) -> None:
    source, client = Source(), Client()
    response = stream(source, client)
    for _ in range(20):
        source.chunks.put_nowait(b"a")
        await asyncio.sleep(0.9 * answers.KEEP_ALIVE_S)
    began = clock.now - 0.9 * answers.KEEP_ALIVE_S
    await asyncio.sleep(1.5 * answers.KEEP_ALIVE_S)
    source.chunks.put_nowait(None)
    await response
    assert client.bodies() == [(b"a", True)] * 20 + [(answers.COMMENT, True)] * 2 + [(b"", False)]
    waited = [at - began for at in client.times[21:23]]
    assert waited == pytest.approx([answers.KEEP_ALIVE_S, 2 * answers.KEEP_ALIVE_S])


async def test_client_that_does_not_read_gets_no_comments(clock: VirtualTime) -> None:
    """While a write is under way; its connection is cut off, which it hears as any other end."""
    source, client = Source(), Client(appetite=1)
    source.chunks.put_nowait(b"a")
    response = stream(source, client)
    await asyncio.sleep(5 * answers.KEEP_ALIVE_S)
    assert not response.done()
    client.has_left.set()
    await response
    assert source.is_closed
    assert len(client.sent) == 1


TOLD = "Request failed during generation: late"
OPENAIS = (
    f'data: {{"error":{{"message":"{TOLD}","type":"server_error","param":null,"code":null}}}}',
    "data: [DONE]",
)


@pytest.mark.parametrize(
    ("path", "body", "status", "first", "last"),
    [
        ("/", {"inputs": "n"}, 424, 'data: {"index":1,', ('"error_type":"generation"}',)),
        ("/v1/completions", {"prompt": "a"}, 500, "data: ", OPENAIS),
        ("/v1/chat/completions", MESSAGES, 500, "data: ", OPENAIS),
        ("/v1/messages", MESSAGES | {"model": "m"}, 500, "event: message_start", ("api_error",)),
        ("/v1/responses", {"input": "n"}, 500, "event: response.created", ("response.failed",)),
    ],
)
async def test_a_failure_is_a_status_or_the_last_event(
    tmp_path: Path, path: str, body: dict[str, Any], status: int, first: str, last: tuple[str, ...]
) -> None:
    async with serve_chat(tmp_path, "hello") as server:
        server.shards.script, server.shards.delay_s = [104], 0.01
        sent = body | {"max_tokens": 1000, "stream": True}
        async with server.client.stream("POST", path, json=sent) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith(first)
            server.shards.failure = GenerationError("late")
            rest = [line async for line in lines if line]
        for line, words in zip(rest[-len(last) :], last, strict=True):
            assert words in line
        assert TOLD in "".join(rest)
        response = await server.client.post(path, json=sent | {"stream": False})
        assert response.status_code == status and TOLD in response.text
        assert server.services.metrics.request_failure.value(err="generation") == 2
        server.shards.failure = None
