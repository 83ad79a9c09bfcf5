"""Admission of requests, between uvicorn and the application. The id of each is in the headers of
its answer and in log lines."""

import asyncio
import re
from collections import deque
from urllib.parse import quote
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from text_generation_router.request_options import ARRIVAL, TRACE, RequestName, become

# Reading and validating a request blocks the event loop; hundreds in one turn would stop every
# stream and /health until the last of them is read.
STARTS_PER_TURN = 4
PROBES = frozenset({"/livez", "/readyz", "/startupz"})
# These stay open during shutdown.
ALWAYS_OPEN = PROBES | {"/metrics"}
STREAM = "text_generation_router.stream"
"""The type of a message that is the whole body of a stream, which `write` writes to a `send`; and
the name of this extension of ASGI in a scope.

It goes through all middleware once. Each layer of FastAPI and starlette wraps `send` in another
coroutine, which does nothing with events but would cost time at each of them.
"""
# After each piece of an answer, the next waits until the client reads.
PIECE_BYTES = 65536
# A client's own id is used if it is safe in a header and a log line.
_GOOD = re.compile(rb"[\w.:-]{1,128}")
_HEADER = b"x-request-id"
_SHOWN_PATH = 128
# Anthropic's clients read another header. They always send their version.
_ANTHROPIC_PATH, _ANTHROPIC_HEADER = "/v1/messages", b"request-id"
_ANTHROPIC_VERSION = b"anthropic-version"


def named(scope: Scope, send: Send) -> Send:
    """A `send` that adds the request's id to the headers. Makes it the task's current request."""
    sent = dict(scope["headers"])
    given = sent.get(_HEADER, b"")
    request_id = given if _GOOD.fullmatch(given) else uuid4().hex.encode()
    # Quoted, so that it is one line.
    path, trace = quote(scope["path"][:_SHOWN_PATH]), scope.get(TRACE)
    trace_id = "" if trace is None else trace.trace_id
    become(RequestName(path, request_id.decode(), trace_id))
    headers = [(_HEADER, request_id)]
    if scope["path"].startswith(_ANTHROPIC_PATH) or _ANTHROPIC_VERSION in sent:
        headers.append((_ANTHROPIC_HEADER, request_id))

    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return send_named


class Front:
    """Starts requests a few at a time, in order of arrival; refuses new ones once it is closed.
    Large answers go out in pieces, and every answer has the id of its request.

    Starts at most `STARTS_PER_TURN` POSTs in one turn of the event loop; a single one does not
    wait. Owns the queue of waiting POSTs.
    """

    def __init__(self, closed: ASGIApp) -> None:
        """`closed` answers before there is an application, and new requests after `close`."""
        self.app = closed
        """What answers; another one may take its place at any time."""
        self._closed = closed
        self._is_closed = False
        self.num_running = 0
        """POSTs that wait or whose answer has not ended."""
        # A semaphore would start them in every second turn only.
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_started = 0
        # Whether `_turn` is scheduled.
        self._is_turning = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = in_pieces(named(scope, send), send)
        if self._is_closed and scope["path"] not in ALWAYS_OPEN:
            await self._closed(scope, receive, answer)
        elif scope["method"] != "POST":
            await self.app(scope, receive, answer)
        else:
            await self._run(scope, receive, answer)

    def close(self) -> None:
        """Refuses new requests from now on; running ones continue."""
        self._is_closed = True

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_running += 1
        scope[ARRIVAL] = asyncio.get_running_loop().time()
        scope["extensions"] = {**scope.get("extensions", {}), STREAM: {}}
        try:
            await self._start()
            await self.app(scope, receive, send)
        finally:
            self.num_running -= 1

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn, loop)
        if self._num_started < STARTS_PER_TURN and not self._waiting:
            self._num_started += 1
            return
        self._waiting.append(place := loop.create_future())
        await place

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the next few; repeats every turn until one starts none."""
        self._num_started = 0
        while self._waiting and self._num_started < STARTS_PER_TURN:
            place = self._waiting.popleft()
            # A request that is cancelled leaves its place in the queue.
            if not place.done():
                place.set_result(None)
                self._num_started += 1
        self._is_turning = self._num_started > 0
        if self._is_turning:
            loop.call_soon(self._turn, loop)


def in_pieces(send_start: Send, send: Send) -> Send:
    """A `send` that waits for the client after each `PIECE_BYTES` of a body. `send_start` names the
    answer; a stream (`STREAM`) is written to the server's own `send` as it comes."""

    async def send_pieces(message: Message) -> None:
        if message["type"] == STREAM:
            await message["write"](send)
            return
        body = message.get("body", b"")
        if len(body) <= PIECE_BYTES:
            await send_start(message)
            return
        for start in range(0, len(body), PIECE_BYTES):
            end = start + PIECE_BYTES
            is_more = message.get("more_body", False) or end < len(body)
            await send({**message, "body": body[start:end], "more_body": is_more})

    return send_pieces
