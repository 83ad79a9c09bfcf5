"""What answers have in common: ids, numbers as TGI prints them, headers with times, the tokens of
a text; how long answers are sent, and streams of server-sent events, which are encoded once; and
one chat that is answered in named events, as Anthropic's Messages and OpenAI's Responses are."""

import asyncio
import logging
import struct
import uuid
from abc import ABC, abstractmethod
from asyncio import FIRST_COMPLETED
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, aclosing
from functools import partial
from itertools import islice
from math import isfinite
from typing import Any

import orjson
from fastapi import Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Receive, Scope, Send
from text_generation_process.json_file import without_line_ends

from text_generation_router.chat.conversation import Conversation
from text_generation_router.chat.service import ChatGeneration, ChatStep
from text_generation_router.edge.front import STREAM
from text_generation_router.errors import RouterError
from text_generation_router.request import TIMES, Ending
from text_generation_router.scheduler.entry import Entry
from text_generation_router.services import Services
from text_generation_router.text.encoding import Encoding

logger = logging.getLogger(__name__)

Json = dict[str, Any]
# Tokens that are written in one go, in less than a millisecond.
_SLICE = 512
# Tokens up to which the answer is written at once, with its length.
_MOST_AT_ONCE = 4 * _SLICE
_pack_float32 = struct.Struct("f").pack


def make_id(prefix: str) -> str:
    """A new id as OpenAI and Anthropic make them, such as msg_0f…"""
    return f"{prefix}_{uuid.uuid4().hex}"


def json_response(content: object, headers: Mapping[str, str] | None = None) -> Response:
    """An answer of JSON; NaN becomes null."""
    return Response(orjson.dumps(content), media_type="application/json", headers=headers)


def float32(value: float | None) -> float | None:
    """A 32-bit float as the shortest decimal that reads back as the same 32 bits."""
    return None if value is None or not isfinite(value) else float(float32_json(value))


def float32_json(value: float | None) -> str:
    """The JSON of `float32(value)`; one is written for every token."""
    if value is None or not isfinite(value):
        return "null"
    bits = _pack_float32(value)
    digits = f"{value:.8g}"
    if _pack_float32(float(digits)) != bits:
        digits = f"{value:.9g}"
    else:
        for shorter in (f"{value:.7g}", f"{value:.6g}"):
            if _pack_float32(float(shorter)) != bits:
                break
            digits = shorter
    # Whole numbers and very small ones are spelled differently in JSON.
    if "." not in digits or "e" in digits:
        return orjson.dumps(float(digits)).decode()
    return digits


def timing_headers(
    endings: Sequence[Ending], prompt_tokens: int, characters: int, services: Services
) -> dict[str, str]:
    """Sums over all sequences, as TGI has them: whole milliseconds, but x-compute-time in seconds.

    `prompt_tokens` and `characters` are those of all prompts, each counted once.
    """
    seconds = {name: sum(each.times[name] for each in endings) for name in TIMES}
    return {
        "x-compute-type": services.compute_type,
        "x-compute-time": f"{seconds['total_time']:.9f}",
        "x-compute-characters": str(characters),
        **{f"x-{name.replace('_', '-')}": str(int(seconds[name] * 1000)) for name in TIMES},
        "x-prompt-tokens": str(prompt_tokens),
        "x-generated-tokens": str(sum(ending.generated.generated_tokens for ending in endings)),
    }


class PieceResponse(StreamingResponse):
    """Makes each piece after the previous one was sent; other tasks run in between.

    `held` is entered here, and left when the answer is sent or its client has disconnected.
    `Connection` closes the connection of a client that stops reading.
    """

    media_type = "application/json"

    def __init__(
        self,
        pieces: Iterable[bytes],
        held: AbstractContextManager[None],
        headers: Mapping[str, str] | None,
    ) -> None:
        super().__init__(_in_turns(pieces), headers=headers)
        self._held = held
        held.__enter__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Returns when the answer has ended."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._held.__exit__(None, None, None)


def in_pieces(
    pieces: Iterable[bytes],
    services: Services,
    *,
    is_short: bool,
    num_bytes: int,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An answer of JSON, in pieces, which hold `num_bytes`; a short one at once, with its length.
    Raises OverloadedError where too many clients have not read theirs."""
    if is_short:
        return Response(b"".join(pieces), media_type="application/json", headers=headers)
    return PieceResponse(pieces, services.long_answers.taken(num_bytes), headers)


async def _in_turns(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)


class TokenizedToken(BaseModel):
    """One token of /tokenize; `start` and `stop` are byte offsets into the input."""

    id: int = Field(description="The number of the token in the vocabulary.")
    text: str
    start: int = Field(description="Where the token begins, in bytes.")
    stop: int = Field(description="Where the token ends, in bytes.")


def token_answer(
    text: str, encoding: Encoding, pieces: Iterator[bytes], services: Services
) -> Response:
    """See `in_pieces`, which raises OverloadedError."""
    num = len(encoding.ids)
    num_bytes = encoding.num_bytes + len(text)
    return in_pieces(pieces, services, is_short=num <= _MOST_AT_ONCE, num_bytes=num_bytes)


def render_tokens(text: str, encoding: Encoding) -> Iterator[bytes]:
    """The JSON list of the tokens of a text, in pieces."""
    tokens = _tokens(text, encoding)
    before = b"["
    while some := list(islice(tokens, _SLICE)):
        yield before + orjson.dumps(some)[1:-1]
        before = b","
    yield b"]" if before == b"," else b"[]"


def _tokens(text: str, encoding: Encoding) -> Iterator[dict[str, object]]:
    is_ascii = text.isascii()
    # A place in the text, in characters and in bytes. Tokens mostly begin where the last one ended.
    place = place_bytes = 0
    for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
        if is_ascii:
            start_bytes, stop_bytes = start, stop
        else:
            start_bytes = place_bytes + _bytes_between(text, place, start)
            stop_bytes = start_bytes + _bytes_between(text, start, stop)
            place, place_bytes = stop, stop_bytes
        yield {
            "id": token_id,
            "text": text[start:stop],
            "start": start_bytes,
            "stop": stop_bytes,
        }


def _bytes_between(text: str, start: int, stop: int) -> int:
    """Negative if the second place is before the first."""
    if start > stop:
        return -_bytes_between(text, stop, start)
    return len(text[start:stop].encode())


KEEP_ALIVE_S = 15
COMMENT = b":\n\n"
"""Keeps a silent stream alive: clients skip it."""
DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""
LastEvent = Callable[[Exception], bytes]
"""Writes the event that ends a failed stream, in the form of its dialect."""


class EventStream(EventSourceResponse):
    """Sends `first`, if there is any, and chunks of ready events; each chunk is one write. If the
    events raise an error, `failed` writes the last one. Inside an event nothing ends a line.

    Closes `events` when the client leaves. `Connection` closes the connection of a client that
    stops reading. A running stream outlives SIGTERM.
    A write costs a clock reading and one call; sse-starlette's own loop makes three tasks and a
    timer for it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        headers: Mapping[str, str],
        failed: LastEvent,
        keep_alive: bytes = COMMENT,
        first: bytes = b"",
    ) -> None:
        # Set here, because starlette would add a charset, which TGI does not send.
        fixed = {"content-type": self.media_type, "cache-control": "no-cache"}
        super().__init__(events, headers={**fixed, **headers})
        del self.headers["connection"]
        self._events = events
        self._failed = failed
        self._keep_alive = keep_alive
        self._first = first
        # Whether a write is in progress, and when the last one began, in the loop's time.
        self._is_writing = False
        self._last_write = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs until the events end or the client disconnects."""
        async with aclosing(self._events):
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            if STREAM in scope.get("extensions", ()):
                await send({"type": STREAM, "write": partial(self._run, receive)})
            else:
                await self._run(receive, send)

    async def _run(self, receive: Receive, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        self._last_write = clock()
        leaving = asyncio.create_task(disconnected(receive))
        writing = asyncio.create_task(self._write_all(send, leaving))
        tasks = (leaving, writing)
        comment = {"type": "http.response.body", "body": self._keep_alive, "more_body": True}
        left_s: float = KEEP_ALIVE_S
        try:
            while not (await asyncio.wait(tasks, timeout=left_s, return_when=FIRST_COMPLETED))[0]:
                left_s = self._last_write + KEEP_ALIVE_S - clock()
                if left_s <= 0:
                    self._last_write, left_s = clock(), KEEP_ALIVE_S
                    # During a write it could come after the end.
                    if not self._is_writing:
                        await send(comment)
        finally:
            writing.cancel()
            leaving.cancel()
            await asyncio.wait(tasks)
        if not writing.cancelled():
            writing.result()

    async def _write_all(self, send: Send, leaving: asyncio.Task[None]) -> None:
        clock = asyncio.get_running_loop().time
        chunk = self._first
        while True:
            if chunk:
                self._last_write = clock()
                self._is_writing = True
                body = without_line_ends(chunk)
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._is_writing = False
                # Writes to a disconnected client return at once: all events would count as sent.
                if leaving.done():
                    return
            try:
                chunk = await anext(self._events)
            except StopAsyncIteration:
                break
            except Exception as error:
                chunk = last_event(error, self._failed)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def open_stream(
    chunks: AsyncGenerator[bytes],
    headers: Mapping[str, str],
    failed: LastEvent,
    keep_alive: bytes = COMMENT,
    has_status: Callable[[Exception], bool] = lambda error: True,
) -> Response:
    """The response that sends `chunks`, of which the first, which may be empty, is awaited here.

    An error before it is raised, and so answered with a status, if `has_status` says so. Every
    other error becomes the last event, which `failed` writes.
    """
    try:
        first = await anext(chunks)
    except Exception as error:
        if has_status(error):
            raise
        first = last_event(error, failed)
    return EventStream(chunks, headers, failed, keep_alive, first)


async def disconnected(receive: Receive) -> None:
    """Returns when the client disconnects. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


def last_event(error: Exception, failed: LastEvent) -> bytes:
    """The end of a stream whose events raised `error`. Logs what is not a RouterError."""
    if not isinstance(error, RouterError):
        logger.exception("A stream failed; this is a bug in the router")
    return failed(error)


def let_streams_finish() -> None:
    """Stops sse-starlette from ending running streams on SIGTERM; uvicorn waits for them."""
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


def event(payload: Mapping[str, Any]) -> bytes:
    """One event; keys keep their order, NaN becomes null."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def named_events(payloads: Iterable[Mapping[str, Any]]) -> bytes:
    """Events with their `type` as the event's name, too, as in newer APIs."""
    return b"".join(b"event: %b\n" % str(p["type"]).encode() + event(p) for p in payloads)


class ChatRun(ABC):
    """Answers one request, whole or as events: a whole answer is what the events spell."""

    def __init__(self, conversation: Conversation, is_stream: bool, services: Services) -> None:
        self._conversation = conversation
        self._is_stream = is_stream
        self.services = services
        self.answer: Json = {}
        """The whole answer, complete once `end` was called."""

    @abstractmethod
    async def begin(self, entry: Entry) -> Sequence[Json]:
        """The first events. Raises RouterError."""

    @abstractmethod
    def feed(self, step: ChatStep) -> Iterable[Json]:
        """The events of the next step."""

    @abstractmethod
    def end(self, generation: ChatGeneration) -> Sequence[Json]:
        """The last events, of a generation that has ended."""

    @abstractmethod
    def written(self, events: Sequence[Json]) -> bytes:
        """The events for one write."""

    @abstractmethod
    def failed(self, error: Exception) -> bytes:
        """The last events of a stream that failed."""

    async def response(
        self,
        headers: Mapping[str, str],
        keep_alive: bytes = COMMENT,
        has_status: Callable[[Exception], bool] = lambda error: True,
    ) -> Response:
        """The answer, whole or as a stream; see `open_stream`. Raises RouterError."""
        if self._is_stream:
            chunks = self._chunks()
            return await open_stream(chunks, headers, self.failed, keep_alive, has_status)
        async for _ in self._events():
            continue
        return json_response(self.answer, headers)

    async def _chunks(self) -> AsyncGenerator[bytes]:
        async with aclosing(self._events()) as batches:
            async for batch in batches:
                yield self.written(batch)

    async def _events(self) -> AsyncGenerator[Sequence[Json]]:
        """The events, those together that are ready together. Raises RouterError."""
        services = self.services
        started = services.chat.start(self._conversation, services.options)
        async with started as (generation,):
            generation.entry.is_shown = self._is_stream
            yield await self.begin(generation.entry)
            async for steps in generation:
                if made := [event for step in steps for event in self.feed(step)]:
                    yield made
        yield self.end(generation)
