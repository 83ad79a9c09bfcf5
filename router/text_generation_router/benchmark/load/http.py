"""HTTP/1.1 to the one server that is loaded, cheap enough for tens of thousands of events a second.

httptools parses, as it does for uvicorn. An event costs a tenth of what a general client takes for
it (httpx: 53 µs, this: 6 µs), and its arrival is known before anything else is done with it.
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
"""(bytes of the body, when they arrived by time.perf_counter). Must not raise."""
# More of an answer that is kept as a whole is refused.
_MAX_BODY = 16 << 20


class RequestError(Exception):
    """A request that did not end well: its kind, under which it is counted, and one sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _UnusedError(Exception):
    """The server closed a connection that it kept, before it sent a byte: ask on a new one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. `body` is empty if it was received piece by piece."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is."""

    host: str
    port: int
    is_tls: bool
    netloc: str
    prefix: str
    """Stands before every path."""

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Of `http://host:port`, with or without `/v1` behind it. Raises BenchmarkError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise BenchmarkError(f"--url {url} is no address: {error}") from error
        is_plain = url.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
            raise BenchmarkError(f"--url {url} must look like http://host:port or https://host")
        if parts.username is not None or parts.query or parts.fragment:
            raise BenchmarkError("--url takes no user, query or fragment: give a key as --api-key")
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, parts.netloc, prefix)


class HttpClient:
    """Owns the connections to one server; each carries one request at a time and is kept.

    No redirects, no proxies: nothing but the given address is ever asked.
    """

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
        return await self._ask(f"GET {self._address.prefix}{path} HTTP/1.1\r\n", b"", None)

    async def post(self, path: str, body: bytes, receive: Receive | None = None) -> Answer:
        """A 200 goes to `receive` as it comes. Raises RequestError if no whole answer came."""
        head = (
            f"POST {self._address.prefix}{path} HTTP/1.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
        )
        return await self._ask(head, body, receive)

    def close(self) -> None:
        """Closes what is idle; call it when no request is under way."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _ask(self, head: str, body: bytes, receive: Receive | None) -> Answer:
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
            answer = await connection.ask(message, receive)
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
        """It can be asked from now on."""
        # uvloop's has all methods of asyncio.Transport, but is no instance of it.
        self._transport = transport  # type: ignore[assignment]
        self.is_open = True

    async def ask(self, message: bytes, receive: Receive | None) -> Answer:
        """Raises RequestError, and _UnusedError if not one byte came back."""
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
        """Closes at once; may be repeated."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """The clock is read first."""
        self._arrived = time.perf_counter()
        self._is_answered = True
        if self._answer is None or self._answer.done():
            # Nothing was asked: what comes now belongs to no request.
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(RequestError("bad answer", f"the answer is no HTTP/1.1: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """An answer without a length ends here; any other one is cut."""
        self.is_open = False
        if self._has_head and not self._has_length and error is None:
            self.on_message_complete()
        elif not self._is_answered:
            self._fail(_UnusedError())
        else:
            self._fail(RequestError("cut stream", "the server closed within its answer"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Whether the end of the body will be known."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        """The rest goes where it was asked for, if it is what was asked for."""
        status = self._parser.get_status_code()
        # One that begins with 1 comes before the answer.
        self._has_head = status >= 200
        if status > 200:
            self._receive = None

    def on_body(self, data: bytes) -> None:
        """Called once for each piece of the body."""
        if self._receive is not None:
            self._receive(data, self._arrived)
            return
        self._body_size += len(data)
        if self._body_size > _MAX_BODY:
            self._fail(RequestError("bad answer", f"an answer of more than {_MAX_BODY} bytes"))
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        """The answer is whole, unless it is one that comes before it."""
        status = self._parser.get_status_code()
        if status >= 200 and self._answer is not None and not self._answer.done():
            self.can_be_kept = self.is_open and self._parser.should_keep_alive()
            self._answer.set_result(Answer(status, b"".join(self._body)))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()
