"""Bodies as large as they may be, on all routes: none stops the event loop, or takes ten times its
size in memory."""

import asyncio
import ctypes
import gc
import json
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from text_generation_router.app import create_app
from text_generation_router.edge.body_cost import ALWAYS_ALLOWED, MOST_TIMES
from text_generation_router.edge.front import in_pieces

from router.tests.chats import TEMPLATE
from router.tests.serving import assemble_scripted

SIZE = 1_990_000
PIECE = 64 * 1024
STATUS = Path("/proc/self/status")
LONGEST_STALL_S = 0.05
TRIES = 3

GENERATE = ("/generate", "/generate_stream", "/", "/tokenize", "/invocations")
CHAT = ("/v1/chat/completions", "/chat_tokenize", "/invocations")
COMPLETIONS = ("/v1/completions", "/invocations")
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
RESPONSES = ("/v1/responses",)
OPEN = ("/v2/models/m/infer",)
KSERVE = ("/v2/models/m/versions/1/infer", *OPEN)
VERTEX = ("/vertex",)
# These tokenize, and tell of each token: with each kind of text once.
QUICK_CHAT = (*CHAT[:1], CHAT[2], MESSAGES[0])
ALL = (*GENERATE, *CHAT[:2], *COMPLETIONS[:1], *MESSAGES, *RESPONSES, *KSERVE, *VERTEX)


def many(before: str, item: str | Callable[[int], str], after: str) -> bytes:
    """As many items as fit, with commas between."""
    sample = item if isinstance(item, str) else item(100_000)
    num = (SIZE - len(before) - len(after)) // (len(sample.encode()) + 1)
    made = [item] * num if isinstance(item, str) else map(item, range(num))
    return f"{before}{','.join(made)}{after}".encode()


def prompt(**more: Any) -> str:
    return json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 1}} | more)[:-1]


TURN = '{"role":"user","content":"x"}'
CHAT_END = '],"max_tokens":1,"model":"tgi"}'
TEXT = "the cat sat on the mat, and nobody knows why. "

BODIES: dict[str, tuple[tuple[str, ...], Callable[[], bytes]]] = {
    "objects": (ALL, lambda: many("[", '{"a":1}', "]")),
    "unknown text": (ALL, lambda: many('{"x":"', "[{:-,", '"}')),
    "a type of megabytes": (
        (*CHAT, *MESSAGES, *RESPONSES),
        lambda: (
            b'{"model":"tgi","max_tokens":1,"input":[{"type":"%b"}],"messages":'
            b'[{"role":"user","content":[{"type":"%b"}]}]}' % ((b"t" * (SIZE // 2 - 80),) * 2)
        ),
    ),
    "deep lists": (ALL, lambda: many("[", "[" * 60 + "]" * 60, "]")),
    "ids": (COMPLETIONS, lambda: many('{"prompt":[', "1", "]}")),
    "tools": (
        CHAT,
        lambda: many(
            '{"messages":[' + TURN + '],"tools":[',
            lambda i: f'{{"function":{{"name":"f{i}"}}}}',
            "]}",
        ),
    ),
    "long keys of biases": (
        COMPLETIONS,
        lambda: many('{"prompt":"a","logit_bias":{', lambda i: f'"{i}{"9" * 4000}":1', "}}"),
    ),
    "a schema": (
        GENERATE,
        lambda: many(
            prompt()[:-1] + ',"grammar":{"type":"json","value":{"properties":{',
            lambda i: f'"{i}":{{"type":"string","description":"{"x" * 200}"}}',
            "}}}}}",
        ),
    ),
    "bytes": (
        KSERVE,
        lambda: many(
            '{"id":"","outputs":[{"name":""}],"inputs":[{"name":"","shape":[1],"datatype":"",'
            '"data":[',
            "104",
            "]}]}",
        ),
    ),
    "text": (GENERATE, lambda: many('{"inputs":"', TEXT, '"}')),
    "chat": (
        (*QUICK_CHAT, MESSAGES[1]),
        lambda: many('{"messages":[{"role":"user","content":"', TEXT, '"}' + CHAT_END),
    ),
}


@dataclass(slots=True)
class Seen:
    """What a request did to the process."""

    status: int = 0
    answer: bytes = b""
    longest_stall_s: float = 0.0
    grown_bytes: int = 0

    def better(self, other: "Seen") -> "Seen":
        """The least of both: what another program did to one of them is not the body's."""
        return Seen(
            self.status,
            self.answer,
            min(self.longest_stall_s, other.longest_stall_s),
            min(self.grown_bytes, other.grown_bytes),
        )

    def is_good(self, body: bytes) -> bool:
        return self.longest_stall_s < LONGEST_STALL_S and self.grown_bytes < allowed(body)


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[FastAPI]:
    config = {"chat_template": TEMPLATE, "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    services = assemble_scripted(directory)
    batching = asyncio.create_task(services.batcher.run())
    try:
        yield create_app(services.config, services)
    finally:
        await services.batcher.close()
        await batching
        services.tokenizer.close()


async def ticking(seen: Seen) -> None:
    """Notes the longest time between two turns of the loop in which this process computed."""
    wall, cpu = time.perf_counter(), time.process_time()
    while True:
        await asyncio.sleep(0.001)
        now, now_cpu = time.perf_counter(), time.process_time()
        seen.longest_stall_s = max(seen.longest_stall_s, min(now - wall, now_cpu - cpu))
        wall, cpu = now, now_cpu


async def post(app: FastAPI, path: str, body: bytes, seen: Seen) -> None:
    """One request, to its end; only the beginning of the answer is kept."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 9),
        "headers": [(b"content-type", b"application/json"), (b"host", b"x")],
    }
    # As a connection does: in pieces, which the router puts together.
    starts = iter(range(0, len(body), PIECE))

    async def receive() -> dict[str, Any]:
        if (start := next(starts, None)) is None:
            await asyncio.Event().wait()
            raise AssertionError
        end = start + PIECE
        return {
            "type": "http.request",
            "body": body[start:end],
            "more_body": end < len(body),
        }

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.status = message["status"]
        elif len(seen.answer) < 1000:
            seen.answer += message["body"][:1000]

    await app(scope, receive, in_pieces(send, send))


def resident(name: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at most (VmHWM).

    What the parser reserves and does not touch is no memory.
    """
    (line,) = [one for one in STATUS.read_text().splitlines() if one.startswith(name)]
    return int(line.split()[1]) * 1024


async def measured(app: FastAPI, path: str, body: bytes) -> Seen:
    seen = Seen()
    # What is made once is no part of it, nor what an earlier one has freed.
    await post(app, path, b"{}", Seen())
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmHWM")
    tick = asyncio.create_task(ticking(seen))
    await asyncio.sleep(0.01)
    await post(app, path, body, seen)
    await asyncio.sleep(0.005)
    tick.cancel()
    seen.grown_bytes = resident("VmHWM") - before
    return seen


async def measured_on_all(name: str) -> dict[str, Seen]:
    """What a body does, by route; the best of up to `TRIES`."""
    paths, make = BODIES[name]
    body = make()
    assert 0.9 * SIZE < len(body) < 2_000_000
    found: dict[str, Seen] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder)) as app:
            for path in dict.fromkeys(paths):
                found[path] = await measured(app, path, body)
                for _ in range(TRIES - 1):
                    if found[path].is_good(body):
                        break
                    found[path] = found[path].better(await measured(app, path, body))
    return found


def allowed(body: bytes) -> int:
    return max(ALWAYS_ALLOWED, MOST_TIMES * len(body))


def answer_all(connection: Connection) -> None:
    """Runs in a process of its own, in which no earlier test has left anything."""
    while name := connection.recv():
        connection.send(asyncio.run(measured_on_all(name)))


@pytest.fixture(scope="module")
def fresh_process() -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=answer_all, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    yield ours
    ours.send("")
    process.join()
    ours.close()


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.slow
def test_no_body_stops_the_loop_or_takes_ten_times_its_size(
    fresh_process: Connection, name: str
) -> None:
    body = BODIES[name][1]()
    fresh_process.send(name)
    for path, seen in fresh_process.recv().items():
        # Refused with one sentence, or answered.
        assert seen.status in (200, 400, 404, 422, 429), (path, seen)
        assert b"server failed" not in seen.answer
        assert seen.status == 200 or len(seen.answer) < 800, (path, seen.answer)
        assert seen.longest_stall_s < LONGEST_STALL_S, (path, seen)
        grown = seen.grown_bytes
        assert grown < allowed(body), f"{path}: {grown / len(body):.1f} times"
