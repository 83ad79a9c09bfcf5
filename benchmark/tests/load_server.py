"""A server that answers the load generator from a script, in a thread."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """The answer; unless `is_whole`, the connection closes after the last piece."""

    status: int = 200
    pieces: list[bytes | float] = field(default_factory=list)
    """Bytes of the body, and seconds to wait before the next ones."""
    is_whole: bool = True
    is_kept: bool = True


Answer = Callable[[str, Json], Reply]


@dataclass
class Scripted:
    """The server, and what it was asked."""

    url: str
    asked: list[tuple[str, Json, dict[str, str]]] = field(default_factory=list)
    """(path, body, headers)."""

    def bodies(self, path: str) -> list[Json]:
        """Of all requests to a path."""
        return [body for asked, body, _ in self.asked if asked == path]


def json_reply(value: Any, status: int = 200) -> Reply:
    """A reply in one piece."""
    return Reply(status, [json.dumps(value).encode()])


def event(value: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def completion(num_tokens: int, prompt_tokens: int | None = 7, gap_s: float = 0.0) -> Reply:
    """A stream of /v1/completions; without prompt_tokens there is no usage."""
    pieces: list[bytes | float] = []
    for number in range(num_tokens):
        pieces += [event({"choices": [{"text": f" {number}", "finish_reason": None}]}), gap_s]
    pieces.append(event({"choices": [{"text": "", "finish_reason": "length"}]}))
    if prompt_tokens is not None:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": num_tokens}
        pieces.append(event({"choices": [], "usage": usage}))
    return Reply(pieces=[*pieces, b"data: [DONE]\n\n"])


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.stopped = answer, threading.Event()
        self.scripted = Scripted(f"http://127.0.0.1:{self.server_port}")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client has left."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_POST(self) -> None:
        """Answers from the script."""
        size = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(size) or "{}")
        self.server.scripted.asked.append((self.path, body, dict(self.headers.items())))
        reply = self.server.answer(self.path, body)
        self.wfile.write(b"HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n" % reply.status)
        for piece in reply.pieces:
            if isinstance(piece, float):
                self.server.stopped.wait(piece)
            else:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        if reply.is_whole:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = not (reply.is_whole and reply.is_kept)

    do_GET = do_POST


@contextmanager
def scripted(answer: Answer) -> Iterator[Scripted]:
    """Serves on a port of this machine inside the block."""
    with _Server(answer) as server:
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        try:
            yield server.scripted
        finally:
            server.stopped.set()
            server.shutdown()
            thread.join(5)
