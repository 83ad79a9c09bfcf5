"""Honest clients during an attack, in a process of their own, and the latencies that they measure.

Run as a program it is that process: it prints `ready` after a measurement without the attack,
continues until its standard input ends, and prints its results as JSON.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from text_generation_benchmark.http import HttpClient, Receive, RequestError
from text_generation_benchmark.streams import APIS, Stream

from integration_tests.server import LauncherHandle

STREAMS = 8
BASELINE_S = 2.0
# The bounds of the issue.
MORE_GAP_S = 0.5
HEALTH_S = 0.3
SMALL_REQUEST_S = 2.0
# More than any delay of the clients' own process by an attack.
LONG_PAUSE_S = 0.2
_TIMEOUT_S = 60.0
_PROMPT = "What does textwrap.dedent do? "


@dataclass
class Seen:
    """The longest times in seconds before and during the attack, and the failures."""

    gap_before: float = 0.0
    gap: float = 0.0
    health: float = 0.0
    small_request: float = 0.0
    # The longest delay of the clients' own process: a pause of the whole machine.
    pause: float = 0.0
    num_tokens: int = 0
    failures: list[str] = field(default_factory=list)

    def assert_unharmed(self) -> None:
        """Fails unless the honest clients were served as if there were no attack."""
        assert not self.failures, self.failures[:5]
        assert self.num_tokens > 0, self
        assert self.gap <= self.gap_before + MORE_GAP_S, self
        assert self.health <= HEALTH_S, self
        assert self.small_request <= SMALL_REQUEST_S, self


@contextmanager
def neighbours(handle: LauncherHandle, key: str = "") -> Iterator[Seen]:
    """During the block, `STREAMS` streams, /health and a small request repeat; after it the yielded
    `Seen` is filled."""
    seen = Seen()
    process = subprocess.Popen(
        [sys.executable, "-m", "integration_tests.hostile.neighbours", handle.url, key],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n", "the honest clients are not served"
        yield seen
        process.stdin.close()
        for name, value in json.loads(process.stdout.readline()).items():
            setattr(seen, name, value)
        assert process.wait(_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def check_unharmed(handle: LauncherHandle, attack: Callable[[], object]) -> None:
    """Runs the attack together with honest clients, which must not notice it. If the whole machine
    stalled meanwhile, the attack is repeated, and the second result counts."""
    with neighbours(handle) as seen:
        attack()
    if seen.pause > LONG_PAUSE_S:
        with neighbours(handle) as seen:
            attack()
    seen.assert_unharmed()


class Neighbours:
    """Owns the honest clients and their measurements."""

    def __init__(self, url: str, key: str) -> None:
        # Attacks on connections are noticed by new ones only.
        self._client = HttpClient(url, key or None, keeps=False)
        self._stopped = asyncio.Event()
        self.seen = Seen()

    async def run(self) -> None:
        """Runs until standard input ends."""
        clients = [self._again(self._stream, 0.0) for _ in range(STREAMS)]
        clients += [self._again(self._health, 0.05), self._again(self._small_request, 0.2)]
        clients += [self._again(self._sleep, 0.0)]
        tasks = [asyncio.create_task(client) for client in clients]
        await asyncio.sleep(BASELINE_S)
        self.seen = Seen(gap_before=self.seen.gap, failures=self.seen.failures)
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        self._stopped.set()
        await asyncio.wait(tasks)
        print(json.dumps(asdict(self.seen)), flush=True)

    async def _again(self, client: Callable[[], Awaitable[None]], pause_s: float) -> None:
        while not self._stopped.is_set():
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await client()
            except (RequestError, TimeoutError, AssertionError) as error:
                name = getattr(client, "__name__", "client")
                self.seen.failures.append(f"{name}: {type(error).__name__}: {error}"[:300])
                await asyncio.sleep(0.1)
            await asyncio.sleep(pause_s)

    async def _stream(self) -> None:
        last_s: float | None = None
        stream, task = Stream(APIS["tgi"].read), asyncio.current_task()

        def receive(data: bytes, arrived_s: float) -> None:
            nonlocal last_s
            if last_s is not None:
                self.seen.gap = max(self.seen.gap, arrived_s - last_s)
            last_s = arrived_s
            self.seen.num_tokens -= len(stream.times)
            stream.feed(data, arrived_s)
            self.seen.num_tokens += len(stream.times)
            if self._stopped.is_set() and task is not None:
                task.cancel()

        body = APIS["tgi"].body(_PROMPT, 400, "", True)
        await self._ask("POST", "/generate_stream", body, receive)
        stream.end(time.perf_counter())
        assert stream.failure is None, stream.failure

    async def _small_request(self) -> None:
        began = time.perf_counter()
        await self._ask("POST", "/generate", APIS["tgi"].body(_PROMPT * 16, 8, "", True))
        self.seen.small_request = max(self.seen.small_request, time.perf_counter() - began)

    async def _health(self) -> None:
        began = time.perf_counter()
        await self._ask("GET", "/health")
        self.seen.health = max(self.seen.health, time.perf_counter() - began)

    async def _sleep(self) -> None:
        began = time.monotonic()
        await asyncio.sleep(0.01)
        self.seen.pause = max(self.seen.pause, time.monotonic() - began - 0.01)

    async def _ask(
        self, method: str, path: str, body: Any = None, receive: Receive | None = None
    ) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        answer = await self._client.request(method, path, content, receive)
        assert answer.status == 200, answer


if __name__ == "__main__":
    asyncio.run(Neighbours(*sys.argv[1:]).run())
