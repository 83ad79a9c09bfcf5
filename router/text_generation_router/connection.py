"""One HTTP connection: what it may send before anybody looks at it, how long it may take, and how
long what it was sent may wait for it.

uvicorn reads and writes; here is what it does not bound. The way of a streamed token is uvicorn's
alone: nothing here is called for it.
"""

import asyncio
import logging
import re
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from text_generation_router.http10 import without_chunks
from text_generation_router.metrics import Counter

# RFC 3986: a name or an address of version 4, or an address in brackets; a port. It may be empty.
_HOST = re.compile(rb"(\[[0-9A-Za-z:.%~_-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(:[0-9]*)?")
_MIB = 1 << 20
_ERROR_TYPES = {503: "overloaded"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a connection may take of memory and time; each is known to the tests by its name."""

    head_bytes: int = 65536
    """Request line and headers; also what may arrive between two things the parser understands."""
    num_headers: int = 100
    head_s: float = 30.0
    """From the first byte of a request, or from the connection's beginning, to the head's end."""
    body_grace_s: float = 10.0
    body_bytes_per_s: float = 1024.0
    """What arrives of a body on average, once the grace is over."""
    all_bodies_bytes: int = 32 * _MIB
    """Of all bodies that are not complete; beyond it the oldest of them is refused."""
    unread_s: float = 30.0
    """In which a client takes what waits for it, which is 128 KiB at most."""
    leftover_s: float = 10.0
    leftover_bytes: int = 16 * _MIB
    """What is read, and thrown away, of a request that has its answer already, so that the client
    comes to read it."""
    num_pipelined: int = 16
    """Requests that wait behind another one of their connection."""
    tick_s: float = 1.0

    @classmethod
    def of(cls, payload_limit: int) -> "ConnectionLimits":
        """Those of a server that takes bodies of so many bytes."""
        least = cls()
        return replace(
            least,
            all_bodies_bytes=max(least.all_bodies_bytes, 16 * payload_limit),
            leftover_bytes=max(least.leftover_bytes, 8 * payload_limit),
        )


class Refusal(Exception):
    """Why a connection is read no further: a status, one of the metric's reasons, a sentence."""

    def __init__(self, status: int, reason: str, sentence: str, *headers: bytes) -> None:
        super().__init__(sentence)
        self.status = status
        self.reason = reason
        self.headers = headers


class Phase(Enum):
    """What a connection waits for."""

    IDLE = "the first byte of a request"
    HEAD = "the rest of its head"
    BODY = "the rest of its body"
    OVER = "the client's end; what still comes is thrown away"


class Connections:
    """Owns what connections share: the clock, the bytes of unfinished bodies, and the count of
    those that were refused.

    One timer looks at all of them, while there are any.
    """

    def __init__(self, limits: ConnectionLimits, refused: Counter) -> None:
        self.limits = limits
        self.now = 0.0
        """The loop's time when it was last looked at."""
        self._refused = refused
        self._open: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        # Bytes of unfinished bodies, the one that began first in front.
        self._bodies: dict[Connection, int] = {}
        self._num_bytes = 0

    @property
    def protocol(self) -> Any:
        """What uvicorn calls for each connection."""
        return partial(Connection, self)

    def enter(self, connection: "Connection") -> None:
        """From now on it is looked at."""
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        self._open.add(connection)
        if self._timer is None:
            self._timer = loop.call_later(self.limits.tick_s, self._look, loop)

    def leave(self, connection: "Connection") -> None:
        """It is closed."""
        self._open.discard(connection)
        self.release(connection)

    def hold(self, connection: "Connection", num_bytes: int) -> None:
        """Counts bytes of an unfinished body. Where all are too many, those that are slow give way:
        the body that began first is refused."""
        self._bodies[connection] = self._bodies.get(connection, 0) + num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self.limits.all_bodies_bytes:
            oldest = next(iter(self._bodies))
            self.release(oldest)
            sentence = "Too many request bodies are under way; send the request again"
            oldest.refuse(Refusal(503, "bodies", sentence, b"retry-after: 1\r\n"))

    def release(self, connection: "Connection") -> None:
        """Its body is complete, or nobody wants it any more."""
        self._num_bytes -= self._bodies.pop(connection, 0)

    def count(self, reason: str) -> None:
        """One more connection was refused, or cut off."""
        self._refused.inc(reason=reason)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = loop.time()
        for connection in tuple(self._open):
            connection.look(self.now)
        again = loop.call_later(self.limits.tick_s, self._look, loop) if self._open else None
        self._timer = again


class Connection(HttpToolsProtocol):
    """Reads requests within `ConnectionLimits`; who exceeds one is told so, and it ends.

    Owns the phase it is in. What waits to be written is at most the high-water mark and one piece,
    since uvicorn's `send` waits for the rest to be taken (`front.in_pieces` makes the pieces).
    """

    def __init__(self, shared: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._shared = shared
        self._limits = shared.limits
        self._phase = Phase.IDLE
        # When the phase began; of an unfinished head, when nothing else was under way any more.
        self._since = 0.0
        # What has arrived since the parser last understood something.
        self._num_unparsed = 0
        self._num_body_bytes = 0
        # The request that is being answered; `cycle` is the one that came last.
        self._answering: RequestResponseCycle | None = None
        # Since when the client owes it to take what waits for it.
        self._unread_since: float | None = None

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        # A TLS transport has other marks.
        transport.set_write_buffer_limits(high=HIGH_WATER_LIMIT)
        self._shared.enter(self)
        self._since = self._shared.now

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.leave(self)
        self.pipeline.clear()
        if self._answering is not None:
            # uvicorn tells the newest request only.
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
            self._count_body(len(data))
        if self._num_unparsed > self._limits.head_bytes:
            self.refuse(self._too_large())

    def _parse(self, data: bytes) -> None:
        """Raises HttpParserError.

        There is no protocol to change to, so that a request which asks for one is read once more
        without asking: its body would be taken for the other protocol, and dropped or parsed.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as pause:
                head = [b"%b %b HTTP/%b\r\n" % self._request_line()]
                head += [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] != b"upgrade"]
                data = b"".join((*head, b"\r\n", data[pause.args[0] :]))

    def _request_line(self) -> tuple[bytes, bytes, bytes]:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        return method, self.url, version.encode()

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._phase = Phase.HEAD
        self._since = self._shared.now
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise Refusal(405, "malformed", "CONNECT is not served; this is no proxy")
        if self.parser.should_upgrade():
            return  # it comes again, see `_parse`
        self._check_head()
        self._unset_keepalive_if_required()
        super().on_headers_complete()
        # Trailers are no headers; they go where nobody looks.
        self.headers = []
        self._phase = Phase.BODY
        self._since = self._shared.now
        self._num_unparsed = self._num_body_bytes = 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if cycle.scope["http_version"] == "1.0":
            app = without_chunks(app, cycle)
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
            # It is the newest request that has its answer: nobody reads the rest of its body.
            self.cycle.body.clear()
            if self._phase is Phase.BODY:
                self._shared.release(self)
                self._since = self._shared.now
                self._num_body_bytes = 0
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread_since is None:
            self._unread_since = self._shared.now

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since = None

    def shutdown(self) -> None:
        is_idle = not (self._is_answering or self.transport.get_write_buffer_size())
        super().shutdown()
        if is_idle and self.scheme == "https":
            # TLS is closed by both sides, and a client that is idle says nothing for 30 s.
            self.transport.abort()

    def look(self, now: float) -> None:
        """Ends the connection if its time is up; called once a `tick_s`."""
        if self._is_unread(now):
            logger.warning("A client read nothing for %g s and was cut off", self._limits.unread_s)
            self._shared.count("unread")
            self.transport.abort()
        elif not self.transport.is_closing():
            self._look_at_phase(now, now - self._since)

    def _look_at_phase(self, now: float, waited_s: float) -> None:
        limits = self._limits
        match self._phase:
            case Phase.IDLE:
                # After an answer uvicorn's own timer runs.
                if self._newest is None and waited_s > limits.head_s:
                    self._shared.count("silent")
                    self.transport.close()
            case Phase.HEAD if self._is_answering:
                self._since = now
            case Phase.HEAD:
                if waited_s > limits.head_s:
                    sentence = f"The request's head did not arrive within {limits.head_s:g} s"
                    self.refuse(Refusal(408, "head_time", sentence))
            case Phase.BODY if self.cycle.response_complete:
                if waited_s > limits.leftover_s:
                    self._shared.count("leftover")
                    self.transport.abort()
            case Phase.BODY if self.flow.read_paused:
                # Nobody asks for more, which is not the client's fault.
                self._since += limits.tick_s
            case Phase.BODY:
                expected = limits.body_bytes_per_s * waited_s
                if waited_s > limits.body_grace_s and self._num_body_bytes < expected:
                    sentence = (
                        "The request body arrives too slowly; send at least "
                        f"{limits.body_bytes_per_s:g} bytes a second"
                    )
                    self.refuse(Refusal(408, "body_rate", sentence))
            case Phase.OVER if self._is_answering:
                self._since = now
            case Phase.OVER:
                if waited_s > limits.leftover_s:
                    self.transport.abort()

    def refuse(self, refusal: Refusal) -> None:
        """Tells the client, if it waits for this answer, and reads no more. Requests that came
        before on the same connection are answered to their end."""
        if self._phase is Phase.OVER or self.transport.is_closing():
            return
        self._shared.count(refusal.reason)
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
        told = {"error": str(refusal), "error_type": _ERROR_TYPES.get(refusal.status, "validation")}
        body = orjson.dumps(told)
        headers = [b"%b: %b\r\n" % pair for pair in self.server_state.default_headers]
        headers += refusal.headers
        headers.append(b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body))
        headers.append(b"connection: close\r\n\r\n")
        self.transport.write(b"".join((STATUS_LINE[refusal.status], *headers, body)))
        # A client that still sends would lose the answer if its bytes found no reader.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _check_head(self) -> None:
        """Raises Refusal, for what the parser lets pass."""
        lengths = (len(name) + len(value) for name, value in self.headers)
        if (
            len(self.headers) > self._limits.num_headers
            or len(self.url) + sum(lengths) > self._limits.head_bytes
        ):
            raise self._too_large()
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise Refusal(400, "malformed", "Only HTTP/1.1 is spoken here")
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version != "1.0"):
            raise Refusal(400, "malformed", f"Expected one `Host` header. Given: {len(hosts)}")
        if hosts and not _HOST.fullmatch(hosts[0]):
            raise Refusal(400, "malformed", "The `Host` header is not a name or an address")
        # Its sentence is never sent: answers to the others come first, and then the end.
        if len(self.pipeline) >= self._limits.num_pipelined:
            raise Refusal(503, "pipelined", "Too many requests wait on this connection")

    def _too_large(self) -> Refusal:
        limits = self._limits
        return Refusal(
            431,
            "head_size",
            f"The request's head is too large: at most {limits.head_bytes} bytes and "
            f"{limits.num_headers} headers are accepted",
        )

    def _count_body(self, num_bytes: int) -> None:
        self._num_body_bytes += num_bytes
        if not self.cycle.response_complete:
            self._shared.hold(self, num_bytes)
        elif self._num_body_bytes > self._limits.leftover_bytes:
            self._shared.count("leftover")
            self.transport.abort()

    @property
    def _newest(self) -> RequestResponseCycle | None:
        """The request that came last; uvicorn does not say that there may be none."""
        return self.cycle

    @property
    def _is_answering(self) -> bool:
        """Whether the newest request has no answer yet, but will get one."""
        cycle = self._newest
        return cycle is not None and not (cycle.response_complete or cycle.disconnected)

    def _is_unread(self, now: float) -> bool:
        """Whether the client has left what waits for it lying too long.

        While an answer is written, that is so as long as uvicorn may not write; what is below the
        marks then hurts nobody. Behind the last answer all of it must be taken.
        """
        if not self.flow.write_paused:
            is_owed = not self._is_answering and self.transport.get_write_buffer_size() > 0
            if not is_owed:
                self._unread_since = None
            elif self._unread_since is None:
                self._unread_since = now
        return self._unread_since is not None and now - self._unread_since > self._limits.unread_s
