"""An HTTP/1.1 client for one server that takes little processor time per event.

512 streams of the router bring 27,000 events per second (docs/performance.md). An event of 512
streams costs 12 µs of the client's processor time here, its JSON included, and 95 µs with httpx,
which would limit the measurement at 10,500 events per second.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from text_generation_benchmark import BenchmarkError

Receive = Callable[[bytes, float], None]
"""(bytes of the body, arrival by time.perf_counter). Must not raise."""


class RequestError(Exception):
    """A request that failed: the kind under which it is counted, and one sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _UnusedError(Exception):
    """The server closed an idle connection before it sent a byte: retry on a new one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer; `body` is empty if it was streamed."""

    status: int
    content_type: str
    body: bytes


class HttpClient:
    """Owns the connections to one server: persistent unless `keeps` is false, with one request at a
    time. Follows no redirects and uses no proxies."""

    def __init__(self, url: str, api_key: str | None = None, keeps: bool = True) -> None:
        """Of `http://host:port`, with or without `/v1` at the end. Raises BenchmarkError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise BenchmarkError(f"--url is not an address: {error}") from error
        is_plain = url.isascii() and url.isprintable() and not set(" @?#").intersection(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
            raise BenchmarkError(
                "--url must look like http://host:port or https://host, without a user or query"
            )
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise BenchmarkError("the API key must be one line of ASCII characters")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, port or (80 if self._tls is None else 443)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._keeps = keeps
        self._headers = (
            f"Host: {parts.netloc}\r\nUser-Agent: text-generation-benchmark\r\nAccept: */*\r\n"
            + ("" if api_key is None else f"Authorization: Bearer {api_key}\r\n")
            + ("" if keeps else "Connection: close\r\n")
        )
        self._idle: list[_Connection] = []

    async def request(
        self, method: str, path: str, body: bytes = b"", receive: Receive | None = None
    ) -> Answer:
        """Streams the body of a 200 to `receive`. Raises RequestError for an incomplete answer."""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        message = f"{head}\r\n".encode() + body
        try:
            if self._idle:
                return await self._exchange(self._idle.pop(), message, receive)
        except _UnusedError:
            pass
        try:
            return await self._exchange(await self._connect(), message, receive)
        except _UnusedError as error:
            raise RequestError("cut stream", "the server closed without an answer") from error

    def close(self) -> None:
        """Closes the connections; call it when no request is in flight."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                _Connection, self._host, self._port, ssl=self._tls
            )
        except OSError as error:
            raise RequestError("connect", str(error) or type(error).__name__) from error
        return connection

    async def _exchange(
        self, connection: "_Connection", message: bytes, receive: Receive | None
    ) -> Answer:
        is_kept = False
        try:
            answer = await connection.send(message, receive)
            is_kept = self._keeps and connection.can_be_kept
        finally:
            if not is_kept:
                connection.abort()
        if is_kept:
            self._idle.append(connection)
        return answer


class _Connection(asyncio.Protocol):
    """One connection; httptools calls the methods that begin with `on_`."""

    def __init__(self) -> None:
        self.can_be_kept = False
        self._is_open = False
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._receive: Receive | None = None
        self._arrived = 0.0
        self._body: list[bytes] = []
        self._content_type = ""
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        # uvloop's class has all methods of asyncio.Transport, but is not a subclass.
        self._transport = transport  # type: ignore[assignment]
        self._is_open = True

    async def send(self, message: bytes, receive: Receive | None) -> Answer:
        """Raises RequestError, or _UnusedError if no byte came back."""
        if self._transport is None or not self._is_open:
            raise _UnusedError
        self._parser = httptools.HttpResponseParser(self)
        self._answer = asyncio.get_running_loop().create_future()
        self._receive = receive
        self._body = []
        self._content_type = ""
        self._is_answered = self.can_be_kept = False
        self._transport.write(message)
        return await self._answer

    def abort(self) -> None:
        """Closes immediately. Idempotent."""
        self._is_open = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Reads the clock, then parses."""
        self._arrived = time.perf_counter()
        self._is_answered = True
        if self._answer is None or self._answer.done():
            # No request is in flight.
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(RequestError("bad answer", f"the answer is not HTTP/1.1: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """The answer is incomplete."""
        if self._is_answered:
            self._fail(RequestError("cut stream", "the server closed during its answer"))
        else:
            self._fail(_UnusedError())

    def on_header(self, name: bytes, value: bytes) -> None:
        """Notes the type."""
        if name.lower() == b"content-type":
            self._content_type = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Only the body of a 200 is streamed."""
        if self._parser.get_status_code() > 200:
            self._receive = None

    def on_body(self, data: bytes) -> None:
        """Streams or collects a piece of the body."""
        if self._receive is None:
            self._body.append(data)
        else:
            self._receive(data, self._arrived)

    def on_message_complete(self) -> None:
        """The answer is complete, unless it is informational."""
        status = self._parser.get_status_code()
        if status >= 200 and self._answer is not None and not self._answer.done():
            self.can_be_kept = self._is_open and self._parser.should_keep_alive()
            self._answer.set_result(Answer(status, self._content_type, b"".join(self._body)))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()
