"""Server-sent events as TGI writes them: `data: {json}` and an empty line, encoded once."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import orjson
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Receive, Scope, Send

from text_generation_router.errors import IncompleteGenerationError, RouterError

KEEP_ALIVE_S = 15
# Where a scope keeps the server's own `send`. Middleware and routing wrap it in several calls, and
# none of them does anything with the events of a stream that has begun.
DIRECT_SEND = "text_generation_router.send"

COMMENT = b":\n\n"
"""What keeps a quiet stream alive: clients skip it."""


class EventStream(EventSourceResponse):
    """Sends `first`, if there is any, and chunks of ready events; each chunk is one write.

    Closes `events` when the client leaves; one that stops reading is cut off by its `Connection`.
    A running stream outlives SIGTERM.
    Three tasks and a timer for each write are what sse-starlette's own way would cost; here a write
    costs a clock reading and the call that does it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        headers: Mapping[str, str],
        keep_alive: bytes = COMMENT,
        first: bytes = b"",
    ) -> None:
        # The type is given here, because starlette would add a charset, which TGI does not send.
        fixed = {"content-type": self.media_type, "cache-control": "no-cache"}
        super().__init__(events, headers={**fixed, **headers})
        del self.headers["connection"]
        self._events = events
        self._keep_alive = keep_alive
        self._first = first
        # Whether a write is under way, and when it or the last one began, in the loop's time.
        self._is_writing = False
        self._last_write = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs until the events are over or the client is."""
        async with aclosing(self._events):
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await self._run(receive, scope.get(DIRECT_SEND, send))

    async def _run(self, receive: Receive, send: Send) -> None:
        self._last_write = asyncio.get_running_loop().time()
        leaving = asyncio.create_task(disconnected(receive))
        writing = asyncio.create_task(self._write_all(send, leaving))
        try:
            while not await _any_done(writing, leaving, timeout_s=self._patience_s()):
                await self._break_silence(send)
        finally:
            writing.cancel()
            leaving.cancel()
            await asyncio.wait((writing, leaving))
        if not writing.cancelled():
            writing.result()

    async def _write_all(self, send: Send, leaving: asyncio.Task[None]) -> None:
        clock = asyncio.get_running_loop().time
        if self._first:
            self._is_writing = True
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            self._is_writing = False
        async for chunk in self._events:
            self._last_write = clock()
            self._is_writing = True
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._is_writing = False
            # Writes to a client that has left return at once: all events would be taken for sent.
            if leaving.done():
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _patience_s(self) -> float:
        """How long a stream on which nothing happens needs no comment."""
        idle_s = asyncio.get_running_loop().time() - self._last_write
        return max(0.0, KEEP_ALIVE_S - idle_s)

    async def _break_silence(self, send: Send) -> None:
        """Where a write is under way, a comment could come behind the end, and helps nobody."""
        if self._patience_s() > 0:
            return
        self._last_write = asyncio.get_running_loop().time()
        if not self._is_writing:
            comment = {"type": "http.response.body", "body": self._keep_alive, "more_body": True}
            await send(comment)


async def _any_done(*tasks: asyncio.Task[None], timeout_s: float) -> bool:
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


def let_streams_finish() -> None:
    """Stops sse-starlette from ending running streams on SIGTERM; uvicorn waits for them."""
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


def event(payload: Mapping[str, Any]) -> bytes:
    """One event; keys keep their order, NaN becomes null."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def named_events(payloads: Iterable[Mapping[str, Any]]) -> bytes:
    """Events that say their `type` before their data as well, as newer APIs have them."""
    return b"".join(b"event: %b\n" % str(p["type"]).encode() + event(p) for p in payloads)


def error_event(error: RouterError) -> bytes:
    """The last event of a stream that failed."""
    if isinstance(error, IncompleteGenerationError):
        words = ("Incomplete generation stream", "incomplete_generation_stream")
    else:
        words = (error.message, error.error_type)
    return event(dict(zip(("error", "error_type"), words, strict=True)))
