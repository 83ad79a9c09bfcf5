"""Bodies with a million errors, long texts, and answers that no client reads."""

import gzip
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import psutil
import pytest

from integration_tests.hostile.neighbours import neighbours
from integration_tests.server import LauncherHandle, wait_until

pytestmark = pytest.mark.timed

SIZE = 1_800_000
MB = 1_000_000
# "Answered within 2 s", regardless of waiting requests.
SMALL_S = 2.0
TEXT = "Where is the long lane? "


def post(handle: LauncherHandle, path: str, body: bytes, **more: str) -> int:
    headers = {"content-type": "application/json"} | more
    return handle.client.post(path, content=body, headers=headers, timeout=120).status_code


def router_bytes(handle: LauncherHandle) -> int:
    process: psutil.Process = handle.child("text-generation-router")
    return int(process.memory_full_info().uss)


def many(before: str, item: str, after: str) -> bytes:
    return f"{before}{','.join([item] * (SIZE // (len(item) + 1)))}{after}".encode()


WRONG = {
    "ids": ("/v1/completions", many('{"prompt":[', "-1", "]}")),
    "unknown ids": ("/v1/completions", many('{"prompt":[', "300000", "]}")),
    "messages": ("/v1/chat/completions", many('{"messages":[', "{}", "]}")),
    "items": ("/v1/responses", many('{"input":[', '{"type":1}', "]}")),
}


@pytest.mark.parametrize("name", WRONG)
def test_bodies_wrong_in_a_million_places(hostile_server: LauncherHandle, name: str) -> None:
    path, body = WRONG[name]
    assert post(hostile_server, path, b"{}") == 400
    before = router_bytes(hostile_server)
    with neighbours(hostile_server) as seen, ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            statuses = list(pool.map(lambda _: post(hostile_server, path, body), range(8)))
            assert set(statuses) == {400}
    seen.assert_unharmed()
    # Eight bodies, in the pieces in which they came and whole, and what the last of them became.
    assert router_bytes(hostile_server) - before < (8 * 2 + 10) * len(body)


def test_compressed_bombs(hostile_server: LauncherHandle) -> None:
    """100 MB in half a megabyte, and values that take many times their compressed size."""
    encoding = {"content-encoding": "gzip"}
    bombs = {
        gzip.compress(bytes(100 * MB), 1): 413,
        gzip.compress(b'{"inputs":"' + b"a" * SIZE * 2, 9): 413,
        gzip.compress(many('{"inputs":[', "{}", "]}"), 9): 400,
    }
    assert post(hostile_server, "/generate", b"{}") == 422
    before = router_bytes(hostile_server)
    with neighbours(hostile_server) as seen, ThreadPoolExecutor(16) as pool:
        for bomb, status in bombs.items():
            answers = pool.map(
                lambda _, sent=bomb: post(hostile_server, "/generate", sent, **encoding),
                range(48),
            )
            assert set(answers) == {status}
    seen.assert_unharmed()
    # What waits is compressed; one at a time becomes what it was, at most --payload-limit.
    assert router_bytes(hostile_server) - before < 60 * MB


@contextmanager
def asking(handle: LauncherHandle, path: str, body: bytes) -> Iterator[socket.socket]:
    """A client that has sent a request, and disconnects without reading."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.settimeout(300)
        client.connect(("127.0.0.1", handle.port))
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        client.sendall(head.encode() + body)
        yield client


@pytest.mark.parametrize("parameters", [{}, {"truncate": 50}], ids=["whole", "cut"])
def test_long_prompts_beside_a_short_one(
    hostile_server: LauncherHandle, parameters: dict[str, int]
) -> None:
    text = TEXT * (SIZE // len(TEXT))
    long = json.dumps({"inputs": text, "parameters": {"max_new_tokens": 1, **parameters}}).encode()
    short = (TEXT * 40)[:500]
    times = []
    with neighbours(hostile_server) as seen, ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(asking(hostile_server, "/generate", long))
        for _ in range(5):
            start = time.perf_counter()
            hostile_server.generate(short, max_new_tokens=1)
            times.append(time.perf_counter() - start)
    assert max(times) < SMALL_S, times
    seen.assert_unharmed()
    # These clients have disconnected; a single request is still answered.
    assert post(hostile_server, "/generate", long) == (200 if parameters else 422)


def test_clients_that_do_not_read_their_tokens(hostile_server: LauncherHandle) -> None:
    body = json.dumps({"inputs": TEXT * (SIZE // len(TEXT))}).encode()
    assert post(hostile_server, "/tokenize", b'{"inputs":"a"}') == 200
    before = router_bytes(hostile_server)
    largest = 0
    with ExitStack() as stack:
        with neighbours(hostile_server) as seen:
            clients = [
                stack.enter_context(asking(hostile_server, "/tokenize", body)) for _ in range(12)
            ]
            # Each has the beginning of its answer, or was refused since the others hold too much.
            begun = [client.recv(12, socket.MSG_PEEK) for client in clients]
            largest = router_bytes(hostile_server)
            start = time.perf_counter()
            assert post(hostile_server, "/tokenize", b'{"inputs":"a"}') == 200
            assert time.perf_counter() - start < SMALL_S
        seen.assert_unharmed()
        assert set(begun) <= {b"HTTP/1.1 200", b"HTTP/1.1 429"}
        assert b"HTTP/1.1 200" in begun
        assert largest - before < 150 * MB
    # They have disconnected, and their memory is free.
    wait_until(lambda: post(hostile_server, "/tokenize", body) == 200, 30, "there is room again")
