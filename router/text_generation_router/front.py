"""What stands between uvicorn and the application."""

import asyncio
from collections import deque

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from text_generation_router.api.sse import DIRECT_SEND
from text_generation_router.request_id import named

# The way from a socket to the queue takes about 0.5 ms of a request, all in one go: hundreds that
# come together would stop every stream, and /health, until the last of them is read.
STARTS_PER_TURN = 4
# How a server comes to its end is worth watching.
ALWAYS_OPEN = "/metrics"
# What of an answer is written before it is asked whether the client takes it.
PIECE_BYTES = 65536


class Front:
    """Lets requests in a few at a time, in the order they came, and tells streams the server's own
    `send`. Once it is closed, new requests are refused. Large answers go out in pieces, and every
    answer bears the id of its request.

    At most `STARTS_PER_TURN` POSTs are started in one turn of the event loop; one that comes alone
    does not wait. Owns the line of those that do.
    """

    def __init__(self, app: ASGIApp, refuse: ASGIApp) -> None:
        self._app = app
        self._refuse = refuse
        self._is_closed = False
        self.num_running = 0
        """POSTs that were let in, or stand in the line, and are not answered to their end."""
        self._line: deque[asyncio.Future[None]] = deque()
        self._num_started = 0
        # Whether the next turn of the event loop has been asked for.
        self._is_turning = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send_named = named(scope, send)
        if self._is_closed and scope["path"] != ALWAYS_OPEN:
            await self._refuse(scope, receive, send_named)
        elif scope["method"] != "POST":
            await self._app(scope, receive, in_pieces(send_named))
        else:
            await self._run(scope, receive, send, send_named)

    def close(self) -> None:
        """Refuses whoever comes from now on; those who are in stay."""
        self._is_closed = True

    async def _run(self, scope: Scope, receive: Receive, send: Send, send_named: Send) -> None:
        self.num_running += 1
        scope[DIRECT_SEND] = send
        try:
            await self._enter()
            await self._app(scope, receive, in_pieces(send_named))
        finally:
            self.num_running -= 1
            # The server's `send` holds the scope: together they would be garbage in a circle.
            del scope[DIRECT_SEND]

    async def _enter(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn, loop)
        if self._num_started < STARTS_PER_TURN and not self._line:
            self._num_started += 1
            return
        place = loop.create_future()
        self._line.append(place)
        await place

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets the next few in; again and again until a turn comes in which nobody is let in."""
        self._num_started = 0
        while self._line and self._num_started < STARTS_PER_TURN:
            place = self._line.popleft()
            # Cancelled places are those of a server that is being ended.
            if not place.done():
                place.set_result(None)
                self._num_started += 1
        self._is_turning = self._num_started > 0
        if self._is_turning:
            loop.call_soon(self._turn, loop)


def in_pieces(send: Send) -> Send:
    """The same `send`, which waits for the client after each `PIECE_BYTES` of a body."""

    async def send_pieces(message: Message) -> None:
        body = message.get("body", b"")
        if len(body) <= PIECE_BYTES:
            await send(message)
            return
        for start in range(0, len(body), PIECE_BYTES):
            end = start + PIECE_BYTES
            is_more = message.get("more_body", False) or end < len(body)
            await send({**message, "body": body[start:end], "more_body": is_more})

    return send_pieces
