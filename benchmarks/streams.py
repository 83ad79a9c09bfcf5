"""Thousands of streaming clients in one process, with little CPU time.

Each keeps one connection and sends one request after the other. Events are counted, not parsed:
only the bytes that mark events, ends of answers and errors are searched.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import Any, cast

import uvloop

OK = b"HTTP/1.1 200 "
# The start of an event, and the end of a chunked body.
EVENT = b"data:"
END = b"\r\n0\r\n\r\n"


def _tgi_body(prompt: str, new_tokens: int) -> dict[str, Any]:
    parameters = {"max_new_tokens": new_tokens, "ignore_eos_token": True, "details": True}
    return {"inputs": prompt, "parameters": parameters}


def _completion_body(prompt: str, new_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": new_tokens, "stream": True}


def _chat_body(prompt: str, new_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": new_tokens, "stream": True}


@dataclass(frozen=True, slots=True)
class Api:
    """The request of one route, and its number of events in addition to one per token."""

    path: str
    body: Callable[[str, int], dict[str, Any]]
    extra_events: int


APIS = {
    "generate": Api("/generate_stream", _tgi_body, 0),
    # The finish reason and [DONE]; for chats also the role.
    "completions": Api("/v1/completions", _completion_body, 2),
    "chat": Api("/v1/chat/completions", _chat_body, 3),
}


@dataclass(frozen=True, slots=True)
class Streams:
    """The load: the requests and the number of concurrent streams."""

    port: int
    api: str
    streams: int
    new_tokens: int
    """On average; the number of each request is random, from half of it to one and a half."""
    seed: int


@dataclass(slots=True)
class Tally:
    """The counters of all clients."""

    events: int = 0
    requests: int = 0
    first_token_s: list[float] = field(default_factory=list)
    error: str = ""


class Client(asyncio.Protocol):
    """One connection; closed after `stop` is set."""

    def __init__(self, load: Streams, number: int, tally: Tally) -> None:
        self._api = APIS[load.api]
        self._load = load
        self._tally = tally
        self._chooser = random.Random(load.seed * 1_000_003 + number)
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._is_answered = False
        self._asked = 0
        self._seen = 0
        self._sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the first request."""
        # uvloop's class has all of its methods, but is not a subclass.
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        average = self._load.new_tokens
        self._asked = self._chooser.randint((average + 1) // 2, average + average // 2)
        self._seen = 0
        self._tail = b""
        self._is_answered = False
        prompt = f"Question {self._chooser.randrange(10**9)}: what do the clients wait for?"
        body = json.dumps(self._api.body(prompt, self._asked)).encode()
        self._transport.write(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (self._api.path.encode(), len(body), body)
        )
        self._sent = time.perf_counter()

    def data_received(self, data: bytes) -> None:
        """Counts events; a marker may be split between two reads."""
        data = self._tail + data
        if not self._is_answered:
            self._is_answered = True
            if not data.startswith(OK):
                self._tally.error = data.decode(errors="replace")
        num_events = data.count(EVENT)
        if num_events:
            if not self._seen:
                self._tally.first_token_s.append(time.perf_counter() - self._sent)
            self._seen += num_events
            self._tally.events += num_events
        self._tail = data[max(len(data) - len(END) + 1, data.rfind(EVENT) + 1) :]
        if data.endswith(END):
            self._end()

    def _end(self) -> None:
        expected = self._asked + self._api.extra_events
        if self._seen != expected:
            self._tally.error = f"a stream of {self._asked} tokens had {self._seen} events"
        self._tally.requests += 1
        self._send()


@dataclass(frozen=True, slots=True)
class Control:
    """Controls the clients' process."""

    events: "Synchronized[int]"
    first_tokens: "Synchronized[int]"
    stop: Event
    tally: "Connection[Tally, None]"
    """Sent once, at the end."""


def run(load: Streams, control: Control) -> None:
    """The clients' process."""
    uvloop.run(_run(load, control))


async def _run(load: Streams, control: Control) -> None:
    tally = Tally()
    loop = asyncio.get_running_loop()
    connections = [
        loop.create_connection(partial(Client, load, n, tally), "127.0.0.1", load.port)
        for n in range(load.streams)
    ]
    transports = [transport for transport, _ in await asyncio.gather(*connections)]
    while not control.stop.is_set() and not tally.error:
        await asyncio.sleep(0.01)
        control.events.value = tally.events
        control.first_tokens.value = len(tally.first_token_s)
    control.tally.send(tally)
    for transport in transports:
        transport.abort()
