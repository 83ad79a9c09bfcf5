"""Server-sent events as TGI writes them: `data: {json}` and an empty line, encoded once."""

import asyncio
import logging
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson
from fastapi.responses import Response
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Receive, Scope, Send
from text_generation_process.json_file import without_line_ends

from text_generation_router.edge.front import STREAM
from text_generation_router.errors import RouterError

logger = logging.getLogger(__name__)

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
