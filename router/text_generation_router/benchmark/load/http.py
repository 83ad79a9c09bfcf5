"""An HTTP/1.1 client for one server, cheap enough for tens of thousands of events per second.

It reads the clock before it parses an event, with httptools.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from text_generation_router.benchmark.measure import BenchmarkError

Receive = Callable[[bytes, float], None]
"""(bytes of the body, arrival by time.perf_counter). Must not raise."""
# Of an answer that is not streamed, in bytes.
_MAX_BODY = 16 << 20


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
    body: bytes


@dataclass(frozen=True, slots=True)
class Address:
    """The address of the server."""

    host: str
    port: int
    is_tls: bool
    netloc: str
    prefix: str
    """Precedes every path."""

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Of `http://host:port`, with or without `/v1` at the end. Raises BenchmarkError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise BenchmarkError(f"--url {url} is not an address: {error}") from error
        is_plain = url.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
            raise BenchmarkError(f"--url {url} must look like http://host:port or https://host")
        if parts.username is not None or parts.query or parts.fragment:
            raise BenchmarkError(
                "--url must not have a user, query or fragment: give a key with --api-key"
            )
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, parts.netloc, prefix)


class HttpClient:
    """Owns the connections to one server: persistent, with one request at a time. Follows no
    redirects and uses no proxies."""

    def __init__(self, address: Address, api_key: str | None) -> None:
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise BenchmarkError("the API key must be one line of ASCII characters")
        self._address = address
        self._tls = ssl.create_default_context() if address.is_tls else None
        key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
        self._headers = (
            f"Host: {address.netloc}\r\n{key}User-Agent: text-generation-benchmark\r\n"
            "Accept: */*\r\nAccept-Encoding: identity\r\n"
        )
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Answer:
        """Raises RequestError."""
        return await self._send(f"GET {self._address.prefix}{path} HTTP/1.1\r\n", b"", None)

    async def post(self, path: str, body: bytes, receive: Receive | None = None) -> Answer:
        """Streams the body of a 200 to `receive`. Raises RequestError for an incomplete answer."""
        head = (
            f"POST {self._address.prefix}{path} HTTP/1.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
        )
        return await self._send(head, body, receive)

    def close(self) -> None:
        """Closes the connections; call it when no request is in flight."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _send(self, head: str, body: bytes, receive: Receive | None) -> Answer:
        message = f"{head}{self._headers}\r\n".encode() + body
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                try:
                    return await self._on(connection, message, receive)
                except _UnusedError:
                    break
        try:
            return await self._on(await self._connect(), message, receive)
        except _UnusedError as error:
            raise RequestError("cut stream", "the server closed without an answer") from error

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        address = self._address
        try:
            _, connection = await loop.create_connection(
                _Connection, address.host, address.port, ssl=self._tls
            )
        except OSError as error:
            raise RequestError("connect", str(error) or type(error).__name__) from error
        return connection

    async def _on(
        self, connection: "_Connection", message: bytes, receive: Receive | None
    ) -> Answer:
        try:
            answer = await connection.send(message, receive)
        except BaseException:
            connection.abort()
            raise
        if connection.can_be_kept:
            self._idle.append(connection)
        else:
            connection.abort()
        return answer


class _Connection(asyncio.Protocol):
    """One connection; httptools calls the methods that begin with `on_`."""

    def __init__(self) -> None:
        self.is_open = False
        self.can_be_kept = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Answer] | None = None
        self._receive: Receive | None = None
        self._arrived = 0.0
        self._body: list[bytes] = []
        self._body_size = 0
        self._is_answered = False
        self._has_head = False
        self._has_length = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        # uvloop's class has all methods of asyncio.Transport, but is not a subclass.
        self._transport = transport  # type: ignore[assignment]
        self.is_open = True

    async def send(self, message: bytes, receive: Receive | None) -> Answer:
        """Raises RequestError, or _UnusedError if no byte came back."""
        if self._transport is None or not self.is_open:
            raise _UnusedError
        self._parser = httptools.HttpResponseParser(self)
        self._answer = asyncio.get_running_loop().create_future()
        self._receive = receive
        self._body = []
        self._body_size = 0
        self._is_answered = self._has_head = self._has_length = self.can_be_kept = False
        self._transport.write(message)
        return await self._answer

    def abort(self) -> None:
        """Closes immediately. Idempotent."""
        self.is_open = False
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
        """Ends an answer without a length; any other answer is incomplete."""
        self.is_open = False
        if self._has_head and not self._has_length and error is None:
            self.on_message_complete()
        elif not self._is_answered:
            self._fail(_UnusedError())
        else:
            self._fail(RequestError("cut stream", "the server closed during its answer"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Notes whether the answer has a length."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        """Only the body of a 200 is streamed."""
        status = self._parser.get_status_code()
        # An informational answer (1xx) precedes the final one.
        self._has_head = status >= 200
        if status > 200:
            self._receive = None

    def on_body(self, data: bytes) -> None:
        """Streams or collects a piece of the body."""
        if self._receive is not None:
            self._receive(data, self._arrived)
            return
        self._body_size += len(data)
        if self._body_size > _MAX_BODY:
            self._fail(RequestError("bad answer", f"an answer of more than {_MAX_BODY} bytes"))
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        """The answer is complete, unless it is informational."""
        status = self._parser.get_status_code()
        if status >= 200 and self._answer is not None and not self._answer.done():
            self.can_be_kept = self.is_open and self._parser.should_keep_alive()
            self._answer.set_result(Answer(status, b"".join(self._body)))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()
