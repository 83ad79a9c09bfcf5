"""Faults of the machine and of many clients at once, with 8 requests running and 8 queued: every
request gets its tokens or an error, and the server recovers by itself."""

import asyncio
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import safetensors.torch
import torch

from integration_tests.hostile.contained import short_of_memory
from integration_tests.hostile.test_connections import attack, attackers
from integration_tests.hub import FakeHub, serving
from integration_tests.server import LauncherHandle, running, wait_until
from integration_tests.test_restarts import FLAGS, clients, expected, ids, ready_again, restarts

pytestmark = pytest.mark.timed

HOUR_S, DAY_S = 3600, 86_400
# Shifts the wall clock of all processes that load it by the seconds in a file.
CLOCK = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <stdio.h>
#include <fcntl.h>
#include <unistd.h>
#include <time.h>
#include <sys/syscall.h>
#include <sys/time.h>
static long offset(void) {
    char text[32] = "0";
    int file = open(getenv("TEST_CLOCK"), O_RDONLY | O_CLOEXEC);
    if (file >= 0) { if (read(file, text, 31) < 0) text[0] = 0; close(file); }
    return atol(text);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int found = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += offset();
    return found;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec, now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}
"""
SLOW_CONNECTIONS, SLOW_S = 2000, 10
VANISHING = 200
DISK_BYTES, LARGE_BYTES = 24 << 20, 16 << 20


def test_the_clock_jumps(tmp_path: Path) -> None:
    source, library, clock = (tmp_path / name for name in ("clock.c", "clock.so", "clock"))
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    clock.write_text("0")
    environment = {"LD_PRELOAD": str(library), "TEST_CLOCK": str(clock)}
    with running(None, *FLAGS, **environment) as handle:
        tokens = expected(handle)
        for offset in (HOUR_S, -2 * DAY_S, 0):
            with clients(handle) as asked:
                clock.write_text(str(offset))
            assert [ids(one.result()[0]) for one in asked] == tokens
            handle.assert_idle()
        assert restarts(handle) == (0, 0)
        before = datetime.now(UTC) - timedelta(seconds=2 * DAY_S)
        assert f"\n{before:%Y-%m-%dT}" in handle.log, "no process has noticed"


def test_a_shard_that_the_system_kills_for_its_memory() -> None:
    with running(None, *FLAGS) as handle:
        tokens = expected(handle)
        shard = handle.child("text-generation-server")
        with ready_again(handle):
            with clients(handle) as asked, short_of_memory(shard, 1 << 20):
                # A long prompt needs new memory.
                handle.generate("def f(x): return x\n" * 150, max_new_tokens=5)
            assert [ids(one.result()[0]) for one in asked] == tokens
        assert restarts(handle) == (1, 0)


def test_two_thousand_connections_that_send_a_byte_a_second(hostile_server: LauncherHandle) -> None:
    async def send(handle: LauncherHandle, check: Callable[[], None]) -> None:
        async with attackers(handle, SLOW_CONNECTIONS) as found:
            for byte in b"POST /generate HTTP/1.1\r\nHost: a\r\n"[:SLOW_S]:
                await asyncio.gather(*(one.send(bytes([byte])) for one in found))
                check()
                await asyncio.sleep(1)

    attack(hostile_server, send)


def test_clients_that_vanish_at_random(hostile_server: LauncherHandle) -> None:
    chance = random.Random(11)
    body = {"inputs": "def f(", "parameters": {"max_new_tokens": 300}}

    async def ask(client: httpx.AsyncClient) -> None:
        await asyncio.sleep(chance.uniform(0, 8))
        route = chance.choice(["/generate", "/generate_stream"])
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(chance.uniform(0, 2)),
                client.stream("POST", route, json=body) as response,
            ):
                assert response.status_code == 200
                async for _ in response.aiter_bytes():
                    pass

    async def vanish(handle: LauncherHandle, check: Callable[[], None]) -> None:
        async with handle.async_client() as client:
            await asyncio.gather(*(ask(client) for _ in range(VANISHING)))
        check()

    attack(hostile_server, vanish)
    hostile_server.assert_idle()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with its own file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    subprocess.run(command, check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_while_a_model_is_downloaded(
    small_disk: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in tiny_model_path.iterdir()}
    large = "model.safetensors"
    files[large] = padded(files[large], LARGE_BYTES)
    filler = small_disk / "filler"
    with serving(FakeHub(files, chunk_delay_s=0.01)) as hub:
        environment = {
            **{"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.endpoint},
            **{"HUGGINGFACE_HUB_CACHE": str(small_disk / "hub")},
        }
        handle = LauncherHandle(None, "--model-id", "some/model", **environment)
        try:
            wait_until(lambda: bool(hub.asked_for(large)), 30, "it downloads the weights")
            filler.write_bytes(bytes(DISK_BYTES - LARGE_BYTES))
            assert handle.wait_for_exit() == 1
            last = handle.log.splitlines()[-1]
            assert "is full: free some space and start again" in last, handle.log
            assert "Traceback" not in handle.log
        finally:
            handle.kill()
        filler.unlink()
        hub.chunk_delay_s = 0
        hub.requests.clear()
        with running(None, "--model-id", "some/model", **environment) as again:
            again.generate("x", max_new_tokens=2)
        assert hub.asked_for(large) == [None]
        assert hub.asked_for("tokenizer.json") == []  # what has arrived is kept


def padded(weights: bytes, size: int) -> bytes:
    """The same tensors, and one more, in a file of that many bytes at least."""
    tensors = safetensors.torch.load(weights)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(size // 4)
    return safetensors.torch.save(tensors)
