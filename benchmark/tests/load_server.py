"""A server that answers the load generator from a script, in a thread."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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


async def _serve(
    server: Scripted, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while True:
            head, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            headers = dict(line.lower().split(": ", 1) for line in lines if line)
            body = json.loads(
                await reader.readexactly(int(headers.get("content-length", 0))) or "{}"
            )
            server.asked.append((head.split()[1], body, headers))
            reply = answer(head.split()[1], body)
            writer.write(b"HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n" % reply.status)
            for piece in reply.pieces:
                if isinstance(piece, float):
                    await asyncio.sleep(piece)
                else:
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if reply.is_whole:
                writer.write(b"0\r\n\r\n")
            if not (reply.is_whole and reply.is_kept):
                return
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    finally:
        writer.close()


@contextmanager
def scripted(answer: Answer) -> Iterator[Scripted]:
    """Serves on a port of this machine inside the block."""
    server, is_ready, stop = Scripted(""), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(asyncio.create_task(_serve(server, answer, reader, writer)))

        listener = await asyncio.start_server(accept, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        is_ready.set()
        async with listener:
            await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    try:
        assert is_ready.wait(5)
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(5)
        loop.close()
