"""The limits of an HTTP connection that uvicorn lacks: size and time of a head, rate of a body, and
the time in which a client reads its answer.

Nothing here is called for a streamed token.
"""

import asyncio
import logging
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httptools
import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from text_generation_router.metrics import Counter

# RFC 3986: a name, an IPv4 address or an address in brackets, and a port. It may be empty.
_HOST = re.compile(rb"(\[[0-9A-Za-z:.%~_-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(:[0-9]*)?")
_MIB = 1 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The memory and time that a connection may take."""

    head_bytes: int = 65536
    """Of request line and headers; also of data that the parser has not understood yet."""
    num_headers: int = 100
    head_s: float = 30.0
    """From the first byte of a request, or from the connection's start, to the end of the head."""
    body_grace_s: float = 10.0
    body_bytes_per_s: float = 1024.0
    """The least average rate of a body after the grace."""
    all_bodies_bytes: int = 32 * _MIB
    """Of all incomplete bodies together; above it the oldest is refused."""
    unread_s: float = 30.0
    """In which a client must read what was written for it."""
    leftover_s: float = 10.0
    leftover_bytes: int = 16 * _MIB
    """The rest of an answered request that is read and dropped, so that its client can end."""
    num_pipelined: int = 16
    """Requests that wait for another one on the same connection."""
    tick_s: float = 1.0

    @classmethod
    def of(cls, payload_limit: int) -> "ConnectionLimits":
        """The limits of a server with this limit for one body."""
        return cls(
            all_bodies_bytes=max(cls().all_bodies_bytes, 16 * payload_limit),
            leftover_bytes=max(cls().leftover_bytes, 8 * payload_limit),
        )


@dataclass(eq=False)
class Refusal(Exception):
    """Why a connection is not read any further; `reason` is that of the metric."""

    status: int
    reason: str
    sentence: str


class Phase(Enum):
    """What a connection waits for."""

    IDLE = "the first byte of a request"
    HEAD = "the rest of its head"
    BODY = "the rest of its body"
    OVER = "the client to disconnect; data is dropped"


class Connections:
    """Owns what connections share: the clock, the bytes of incomplete bodies and the count of
    refused connections. One timer checks all open connections."""

    def __init__(self, limits: ConnectionLimits, refused: Counter) -> None:
        self.limits = limits
        self.now = 0.0
        """The loop's time at the last tick."""
        self.refused = refused
        """Counts by reason; another counter may take its place."""
        self._timer: asyncio.TimerHandle | None = None
        # Bytes of incomplete bodies, oldest first.
        self._bodies: dict[Connection, int] = {}
        self._num_bytes = 0

    def watch(self, connections: set[Any]) -> None:
        """Checks the open connections of a server until none is left."""
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        if self._timer is None and connections:
            self._timer = loop.call_later(self.limits.tick_s, self._check_all, connections)

    def hold(self, connection: "Connection", num_bytes: int) -> None:
        """Counts bytes of an incomplete body. Above the limit for all bodies the oldest is refused,
        which is the slowest."""
        self._bodies[connection] = self._bodies.get(connection, 0) + num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self.limits.all_bodies_bytes:
            oldest = next(iter(self._bodies))
            self.release(oldest)
            sentence = "Too many incomplete request bodies; send the request again"
            oldest.refuse(Refusal(503, "bodies", sentence))

    def release(self, connection: "Connection") -> None:
        """The connection's body is complete or not needed any more."""
        self._num_bytes -= self._bodies.pop(connection, 0)

    def _check_all(self, connections: set[Any]) -> None:
        self._timer = None
        self.watch(connections)
        for connection in tuple(connections):
            connection.check(self.now)


class Connection(HttpToolsProtocol):
    """Reads requests within `ConnectionLimits`. Above one it answers with an error and closes.

    Owns its phase. Its write buffer holds at most the high-water mark and one piece, since
    uvicorn's `send` waits until the client reads (`front.in_pieces` makes the pieces).
    """

    def __init__(self, shared: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._shared = shared
        self._limits = shared.limits
        self._phase = Phase.IDLE
        # When the phase began; of an incomplete head, when the answer before it was complete.
        self._since = 0.0
        # Bytes since the parser last understood something.
        self._num_unparsed = 0
        self._num_body_bytes = 0
        # The request that is being answered; `cycle` is the newest one.
        self._answering: RequestResponseCycle | None = None
        # Since when the client has not read what was written for it.
        self._unread_since: float | None = None

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        # TLS transports have another default.
        transport.set_write_buffer_limits(high=HIGH_WATER_LIMIT)
        self._shared.watch(self.connections)
        self._since = self._shared.now

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.release(self)
        self.pipeline.clear()
        if self._answering is not None:
            # uvicorn only notifies the newest request.
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_unparsed += len(data)
        if self._phase is Phase.OVER:
            if self._num_unparsed > self._limits.leftover_bytes:
                self.transport.abort()
            return
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            reason = error.__context__
            if not isinstance(reason, Refusal):
                reason = Refusal(400, "malformed", "The request is not valid HTTP/1.1")
            self.refuse(reason)
            return
        if self._phase is Phase.BODY:
            self._num_body_bytes += len(data)
            if not self.cycle.response_complete:
                self._shared.hold(self, len(data))
            elif self._num_body_bytes > self._limits.leftover_bytes:
                self._shared.refused.inc(reason="leftover")
                self.transport.abort()
        if self._num_unparsed > self._limits.head_bytes:
            self.refuse(self._too_large())

    def _parse(self, data: bytes) -> None:
        """Raises HttpParserError.

        No upgrade is supported, so the head of a request with `Upgrade` is parsed again without it.
        Otherwise the parser would treat the body as the other protocol's data. A new parser reads
        it: the old one has seen the last request if the connection is to be closed after it.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as pause:
                version = self.parser.get_http_version().encode()
                head = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
                head += [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] != b"upgrade"]
                data = b"".join((*head, b"\r\n", data[pause.args[0] :]))
                self.parser = httptools.HttpRequestParser(self)
                # As uvicorn does: what follows the last request of a connection is dropped.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._phase = Phase.HEAD
        self._since = self._shared.now
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise Refusal(405, "malformed", "CONNECT is not supported; this server is not a proxy")
        if self.parser.should_upgrade():
            return  # the head is parsed again, see `_parse`
        self._check_head()
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False
        self._unset_keepalive_if_required()
        super().on_headers_complete()
        # Trailers are dropped: they must not become headers.
        self.headers = []
        self._phase = Phase.BODY
        self._since = self._shared.now
        self._num_unparsed = self._num_body_bytes = 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_unparsed = 0
        self._phase = Phase.IDLE
        if self._num_body_bytes:
            self._shared.release(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline:
            # The newest request has its answer: the rest of its body is not needed.
            self.cycle.body.clear()
            if self._phase is Phase.BODY:
                self._shared.release(self)
                self._since = self._shared.now
                self._num_body_bytes = 0
        super().on_response_complete()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since = None

    def shutdown(self) -> None:
        is_idle = not (self._is_answering or self.transport.get_write_buffer_size())
        super().shutdown()
        if is_idle and self.scheme == "https":
            # TLS waits for the client's close, which an idle client does not send.
            self.transport.abort()

    def check(self, now: float) -> None:
        """Ends the connection if a time limit has passed; called every `tick_s`."""
        if self._is_unread(now):
            unread_s = self._limits.unread_s
            logger.warning("A client read nothing for %g s and was disconnected", unread_s)
            self._shared.refused.inc(reason="unread")
            self.transport.abort()
        elif not self.transport.is_closing():
            self._check_phase(now, now - self._since)

    def _check_phase(self, now: float, waited_s: float) -> None:
        limits = self._limits
        match self._phase:
            case Phase.IDLE:
                # After an answer uvicorn's own timer is active.
                if self._newest is None and waited_s > limits.head_s:
                    self._shared.refused.inc(reason="silent")
                    self.transport.close()
            case Phase.HEAD | Phase.OVER if self._is_answering:
                self._since = now
            case Phase.HEAD:
                if waited_s > limits.head_s:
                    sentence = f"The request's head did not arrive within {limits.head_s:g} s"
                    self.refuse(Refusal(408, "head_time", sentence))
            case Phase.BODY if self.cycle.response_complete:
                if waited_s > limits.leftover_s:
                    self._shared.refused.inc(reason="leftover")
                    self.transport.abort()
            case Phase.BODY if self.flow.read_paused:
                # The application reads too slowly: the client is not late.
                self._since += limits.tick_s
            case Phase.BODY:
                expected = limits.body_bytes_per_s * waited_s
                if waited_s > limits.body_grace_s and self._num_body_bytes < expected:
                    sentence = (
                        "The request body arrives too slowly; send at least "
                        f"{limits.body_bytes_per_s:g} bytes a second"
                    )
                    self.refuse(Refusal(408, "body_rate", sentence))
            case Phase.OVER:
                if waited_s > limits.leftover_s:
                    self.transport.abort()

    def refuse(self, refusal: Refusal) -> None:
        """Answers with the error if this request is next, and stops reading. Earlier requests of
        the connection still get their answers."""
        if self._phase is Phase.OVER or self.transport.is_closing():
            return
        self._shared.refused.inc(reason=refusal.reason)
        self._shared.release(self)
        is_in_body = self._phase is Phase.BODY
        self._phase = Phase.OVER
        self._since = self._shared.now
        self._num_unparsed = 0
        if is_in_body and (self.pipeline or self.cycle.response_started):
            self.transport.abort()
        elif is_in_body:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._answer(refusal)
        elif self._is_answering:
            self.cycle.keep_alive = False
        else:
            self._answer(refusal)

    def _answer(self, refusal: Refusal) -> None:
        is_full = refusal.status == 503
        error_type = "overloaded" if is_full else "validation"
        body = orjson.dumps({"error": refusal.sentence, "error_type": error_type})
        headers = [b"%b: %b\r\n" % pair for pair in self.server_state.default_headers]
        headers += [b"retry-after: 1\r\n"] * is_full
        headers.append(b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body))
        headers.append(b"connection: close\r\n\r\n")
        self.transport.write(b"".join((STATUS_LINE[refusal.status], *headers, body)))
        # Half-closed, not closed: a client that still sends could lose the answer to a reset.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _check_head(self) -> None:
        """Raises Refusal for invalid heads that the parser accepts."""
        lengths = (len(name) + len(value) for name, value in self.headers)
        if (
            len(self.headers) > self._limits.num_headers
            or len(self.url) + sum(lengths) > self._limits.head_bytes
        ):
            raise self._too_large()
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise Refusal(400, "malformed", "Only HTTP/1.1 and HTTP/1.0 are supported")
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version != "1.0"):
            raise Refusal(400, "malformed", f"Expected one `Host` header. Given: {len(hosts)}")
        if hosts and not _HOST.fullmatch(hosts[0]):
            raise Refusal(400, "malformed", "The `Host` header is not a name or an address")
        # This sentence is never sent: the connection ends after the answers before it.
        if len(self.pipeline) >= self._limits.num_pipelined:
            raise Refusal(503, "pipelined", "Too many requests wait on this connection")

    def _too_large(self) -> Refusal:
        limits = self._limits
        return Refusal(
            431,
            "head_size",
            f"The request's head is too large: send at most {limits.head_bytes} bytes and "
            f"{limits.num_headers} headers",
        )

    @property
    def _newest(self) -> RequestResponseCycle | None:
        """The newest request, if any; uvicorn's annotation lacks None."""
        return self.cycle

    @property
    def _is_answering(self) -> bool:
        """Whether the newest request is waiting for the end of its answer."""
        cycle = self._newest
        return cycle is not None and not (cycle.response_complete or cycle.disconnected)

    def _is_unread(self, now: float) -> bool:
        """Whether the client has read too little for too long.

        During an answer the time counts while uvicorn has paused writing. After the last answer it
        counts until the write buffer is empty.
        """
        is_owed = self.flow.write_paused or (
            not self._is_answering and self.transport.get_write_buffer_size() > 0
        )
        if not is_owed:
            self._unread_since = None
            return False
        if self._unread_since is None:
            self._unread_since = now
        return now - self._unread_since > self._limits.unread_s


def _without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """The application for one HTTP/1.0 request. HTTP/1.0 has no chunks: uvicorn closes the
    connection after it, which ends an answer without a length."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = False

        async def send_plainly(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = b"content-length" in {name.lower() for name, _ in message["headers"]}
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                # uvicorn checks the length that it expects; here any length is valid.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return run
