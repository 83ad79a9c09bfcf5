"""Server-sent events as TGI writes them: `data: {json}` and an empty line, encoded once."""

import logging
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import orjson
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import AppStatus, EventSourceResponse, SendTimeoutError
from starlette.types import Receive, Scope, Send

from text_generation_router.errors import IncompleteGenerationError, RouterError

KEEP_ALIVE_S = 15
# A client that takes nothing for so long is gone, whatever its socket says.
SEND_TIMEOUT_S = 30

logger = logging.getLogger(__name__)


COMMENT = b":\n\n"
"""What keeps a quiet stream alive: clients skip it."""


class _KeepAlive(ServerSentEvent):
    """An event that is encoded already."""

    def __init__(self, encoded: bytes) -> None:
        super().__init__()
        self._encoded = encoded

    def encode(self) -> bytes:
        return self._encoded


class EventStream(EventSourceResponse):
    """Sends chunks of ready events; each chunk is one write.

    Closes `events` when the client leaves or stops reading. A running stream outlives SIGTERM.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterable[bytes],
        headers: Mapping[str, str],
        keep_alive: bytes = COMMENT,
    ) -> None:
        # The type is given here, because starlette would add a charset, which TGI does not send.
        fixed = {"content-type": self.media_type, "cache-control": "no-cache"}
        super().__init__(
            events,
            headers={**fixed, **headers},
            ping=KEEP_ALIVE_S,
            ping_message_factory=lambda: _KeepAlive(keep_alive),
            send_timeout=SEND_TIMEOUT_S,
        )
        del self.headers["connection"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            logger.warning("A client read nothing for %d s and was cut off", SEND_TIMEOUT_S)


def let_streams_finish() -> None:
    """Stops sse-starlette from ending running streams on SIGTERM; uvicorn waits for them."""
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


def event(payload: Mapping[str, Any]) -> bytes:
    """One event; keys keep their order, NaN becomes null."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def events(payloads: Iterable[Mapping[str, Any]]) -> bytes:
    """Events that are ready together, for one write."""
    return b"".join(map(event, payloads))


def named_events(payloads: Iterable[Mapping[str, Any]]) -> bytes:
    """Events that say their `type` before their data as well, as newer APIs have them."""
    return b"".join(b"event: %b\n" % str(p["type"]).encode() + event(p) for p in payloads)


async def begun(chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The same chunks, of which the first is there already: what fails before it is raised here,
    where it can still become a status."""
    first = await anext(chunks)

    async def all_of_them() -> AsyncGenerator[bytes]:
        async with aclosing(chunks):
            yield first
            async for chunk in chunks:
                yield chunk

    return all_of_them()


def error_event(error: RouterError) -> bytes:
    """The last event of a stream that failed."""
    if isinstance(error, IncompleteGenerationError):
        words = ("Incomplete generation stream", "incomplete_generation_stream")
    else:
        words = (error.message, error.error_type)
    return event(dict(zip(("error", "error_type"), words, strict=True)))
