"""The load generator: streamed requests of a closed loop of clients, or of an open loop."""

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from text_generation_benchmark.http import HttpClient, RequestError
from text_generation_benchmark.streams import Api, Stream, message_of

# Between a failed request and the client's next one, so as not to flood a server that refuses.
PAUSE_AFTER_FAILURE_S = 0.1


@dataclass(frozen=True, slots=True)
class Bounds:
    """What ends a load: a number of requests or seconds, whichever comes first. Running requests
    then end, at the latest at their timeout."""

    requests: int
    seconds: float
    timeout_s: float


class Load:
    """Sends the requests of one load, and owns their streams: `running` and `ended` ones.

    If it is cancelled, the running ones stay in `running`.
    """

    def __init__(self, client: HttpClient, api: Api, bodies: Iterator[bytes]) -> None:
        self.running: set[Stream] = set()
        self.ended: list[Stream] = []
        self.num_events = 0
        """Of the ended streams."""
        self.cpu_share = 0.0
        """Of one core, taken by this process."""
        self._client, self._api, self._bodies = client, api, bodies
        self._started_s: float | None = None
        self._ended_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """From the first request to the end of the last one, or until now."""
        if self._started_s is None:
            return 0.0
        return (time.perf_counter() if self._ended_s is None else self._ended_s) - self._started_s

    async def closed_loop(self, clients: int, bounds: Bounds) -> None:
        """Each client sends its next request when its stream has ended."""
        with self._measured() as started_s:
            bodies = islice(self._bodies, bounds.requests)

            async def run_client() -> None:
                for body in bodies:
                    stream = await self._send(body, bounds.timeout_s)
                    if time.perf_counter() >= started_s + bounds.seconds:
                        return
                    if stream.failure is not None:
                        await asyncio.sleep(PAUSE_AFTER_FAILURE_S)

            async with asyncio.TaskGroup() as group:
                for _ in range(min(clients, bounds.requests)):
                    group.create_task(run_client())

    async def open_loop(self, rate: float, chooser: random.Random, bounds: Bounds) -> None:
        """Poisson arrivals, independent of running streams."""
        with self._measured() as started_s:
            due_s = started_s
            async with asyncio.TaskGroup() as group:
                for body in islice(self._bodies, bounds.requests):
                    due_s += chooser.expovariate(rate)
                    if due_s - started_s > bounds.seconds:
                        break
                    # uvloop's timers have whole milliseconds, and may be early.
                    while (left_s := due_s - time.perf_counter()) > 0:
                        await asyncio.sleep(left_s)
                    group.create_task(self._send(body, bounds.timeout_s, due_s))

    @contextmanager
    def _measured(self) -> Iterator[float]:
        self._started_s, cpu_s = time.perf_counter(), time.process_time()
        try:
            yield self._started_s
        finally:
            self._ended_s = time.perf_counter()
            self.cpu_share = (time.process_time() - cpu_s) / self.elapsed_s

    async def _send(self, body: bytes, timeout_s: float, due_s: float | None = None) -> Stream:
        stream = Stream(self._api.read, due_s)
        self.running.add(stream)
        await send(self._client, self._api.path, body, stream, timeout_s)
        self.running.remove(stream)
        self.ended.append(stream)
        self.num_events += stream.num_events
        return stream


async def send(
    client: HttpClient, path: str, body: bytes, stream: Stream, timeout_s: float
) -> None:
    """Sends one request and reads its answer into the stream, which holds any failure."""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await client.request("POST", path, body, stream.feed)
    except TimeoutError:
        stream.fail("timeout", f"no end after {timeout_s:g} s", time.perf_counter())
    except RequestError as error:
        stream.fail(error.kind, str(error), time.perf_counter())
    else:
        if answer.status == 200:
            stream.end(time.perf_counter())
        else:
            kind = f"HTTP {answer.status}"
            stream.fail(kind, message_of(answer.body), time.perf_counter())
