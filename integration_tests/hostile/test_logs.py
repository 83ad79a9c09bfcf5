"""Requests are served while no process reads the log: a pager that is open, a log driver that
hangs, a launcher that is stopped."""

import fcntl
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

from integration_tests.server import LauncherHandle, has_ended, wait_until

# Requests that are refused are a line of the log, too.
REFUSED = {"inputs": "a", "parameters": {"max_new_tokens": 0}}
# The buffers of the kernel, and of router and launcher: 64 KiB, and 1 MiB or 4,096 lines each.
MORE_THAN_IS_KEPT = 5500
CLIENTS = 16


def ask(handle: LauncherHandle, count: int) -> None:
    """Sends `count` requests, and asserts that all are answered."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        numbers = pool.map(lambda _: ask_one_by_one(handle.port, count // CLIENTS), range(CLIENTS))
        assert sum(numbers) == count // CLIENTS * CLIENTS


def ask_one_by_one(port: int, count: int) -> int:
    """The number of its requests with the expected answers."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    number = 0
    for _ in range(count):
        headers = {"content-type": "application/json"}
        connection.request("POST", "/generate", json.dumps(REFUSED), headers)
        response = connection.getresponse()
        response.read()
        number += response.status == 422
    connection.close()
    return number


@contextmanager
def unread(model: Path, *flags: str) -> Iterator[tuple[LauncherHandle, int]]:
    """A serving launcher and the read end of its log's pipe, which holds one page."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)

    def write_there() -> None:
        os.dup2(writer, 1)
        os.dup2(writer, 2)

    handle = LauncherHandle(model, *flags, in_child=write_there)
    os.close(writer)
    try:
        yield handle, reader
    finally:
        handle.kill()
        os.close(reader)


def fill(pipe: int) -> None:
    """Writes until it is full."""
    os.set_blocking(pipe, False)
    try:
        while os.write(pipe, b"x" * 4096):
            continue
    except BlockingIOError:
        os.set_blocking(pipe, True)


def test_nobody_reads_and_then_somebody_does(tiny_model_path: Path) -> None:
    """`| less`: requests are answered, lost lines are counted, and the last lines are written."""
    with unread(tiny_model_path, "--json-output") as (handle, reader):
        handle.wait_until_ready()
        ask(handle, MORE_THAN_IS_KEPT)
        assert handle.generate("the cat sat on ", max_new_tokens=2)["generated_text"]
        parts: list[bytes] = []
        reading = threading.Thread(
            target=lambda: parts.extend(iter(lambda: os.read(reader, 1 << 16), b""))
        )
        reading.start()
        wait_until(lambda: b"dropped here" in b"".join(parts), 20, "it says what was lost")
        handle.process.send_signal(signal.SIGTERM)
        assert handle.wait_for_exit(20) == 0
        reading.join(20)
    records = [json.loads(line) for line in b"".join(parts).splitlines()]
    messages = [record["message"] for record in records]
    lost = [
        int(found[1]) for m in messages if (found := re.match(r"lines dropped here.* (\d+)$", m))
    ]
    refused = sum("must be strictly positive" in message for message in messages)
    assert lost and refused + sum(lost) >= MORE_THAN_IS_KEPT // CLIENTS * CLIENTS
    assert any("received SIGTERM: stopping" in message for message in messages)
    assert messages[-1].startswith("Stopped by SIGTERM")


def test_nobody_ever_reads(tiny_model_path: Path) -> None:
    """Signals end the server in order; it waits for its last log lines, but not for long."""
    with unread(tiny_model_path) as (handle, reader):
        handle.wait_until_ready()
        ask(handle, 600)
        family = handle.family()
        started = time.monotonic()
        handle.process.send_signal(signal.SIGTERM)
        assert handle.wait_for_exit(20) == 0
        assert all(map(has_ended, family))
        assert time.monotonic() - started < 15
        assert b"Options: " in os.read(reader, 1 << 16)


def test_a_start_that_fails_while_nobody_reads(tmp_path: Path) -> None:
    """The exit code is the usual one; the reason is written if the pipe is read in time."""
    reader, writer = os.pipe()
    fill(writer)
    handle = LauncherHandle(tmp_path, in_child=lambda: os.dup2(writer, 1))
    os.close(writer)
    try:
        assert handle.wait_for_exit() == 1
    finally:
        handle.kill()
        os.close(reader)
    with unread(tmp_path) as (handle, reader):
        text = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
        assert handle.wait_for_exit() == 1
    (error,) = [line for line in text.decode().splitlines() if " ERROR " in line]
    assert str(tmp_path) in error


def test_the_launcher_is_stopped(tiny_model_path: Path) -> None:
    """Its children's pipes fill up; they serve, count lost lines, and recover when it continues."""
    handle = LauncherHandle(tiny_model_path, "--json-output")
    try:
        handle.wait_until_ready()
        handle.process.send_signal(signal.SIGSTOP)
        try:
            ask(handle, MORE_THAN_IS_KEPT)
            assert handle.generate("the cat sat on ", max_new_tokens=2)["generated_text"]
            lost = handle.metrics()["tgi_log_lines_dropped"]
            assert lost > 0
        finally:
            handle.process.send_signal(signal.SIGCONT)
        sentence = f"lines dropped here, because the log was not read: {lost:.0f}"
        wait_until(lambda: sentence in handle.log, 20, "it says how many were lost")
        ask(handle, CLIENTS)
        log = handle.stop()
    finally:
        handle.kill()
    assert handle.process.returncode == 0
    refused = sum("must be strictly positive" in line for line in log.splitlines())
    # One of the lost lines was the generation's.
    assert refused + lost == (MORE_THAN_IS_KEPT // CLIENTS + 1) * CLIENTS + 1
