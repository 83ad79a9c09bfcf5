"""Sends streaming requests to a server: a closed loop of clients, or an open loop of arrivals."""

import asyncio
import random
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from text_generation_router.benchmark.load.api import Target
from text_generation_router.benchmark.load.events import StreamReader
from text_generation_router.benchmark.load.figures import LoadFigures, Result
from text_generation_router.benchmark.load.http import HttpClient, RequestError
from text_generation_router.benchmark.load.target import message_of

# Between a failed request and the client's next one, so as not to flood a server that refuses.
PAUSE_AFTER_FAILURE_S = 0.1


@dataclass(frozen=True, slots=True)
class Bounds:
    """What ends a point: a number of requests or seconds, whichever comes first. Running requests
    then end, at the latest at their timeout."""

    requests: int
    seconds: float
    timeout_s: float


class LoadRun:
    """Runs one point after the other; owns the order of prompts and arrivals."""

    def __init__(
        self, client: HttpClient, target: Target, prompts: Iterator[str], chooser: random.Random
    ) -> None:
        self._client = client
        self._target = target
        self._prompts = prompts
        self._chooser = chooser

    async def run(self, figures: LoadFigures, bounds: Bounds) -> None:
        """Fills the figures; if cancelled, with the results so far."""
        figures.started_s = time.perf_counter()
        cpu_s = time.process_time()
        try:
            if figures.point.rate is not None:
                await self._open_loop(figures, bounds, figures.point.rate)
            else:
                await self._closed_loop(figures, bounds, figures.point.clients or 1)
        finally:
            figures.ended_s = time.perf_counter()
            figures.cpu_share = (time.process_time() - cpu_s) / figures.elapsed_s

    async def _closed_loop(self, figures: LoadFigures, bounds: Bounds, clients: int) -> None:
        ends_s = time.perf_counter() + bounds.seconds
        numbers = iter(range(bounds.requests))

        async def run_client() -> None:
            pause_s = 0.0
            for _ in numbers:
                await asyncio.sleep(pause_s)
                result = await self._request(figures, bounds.timeout_s, None)
                pause_s = 0.0 if result.failure is None else PAUSE_AFTER_FAILURE_S
                if time.perf_counter() >= ends_s:
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(min(clients, bounds.requests)):
                group.create_task(run_client())

    async def _open_loop(self, figures: LoadFigures, bounds: Bounds, rate: float) -> None:
        started_s = time.perf_counter()
        due_s = started_s
        async with asyncio.TaskGroup() as group:
            for _ in range(bounds.requests):
                # Poisson: the times between arrivals are exponential.
                due_s += self._chooser.expovariate(rate)
                if due_s - started_s > bounds.seconds:
                    break
                # uvloop's timers have whole milliseconds, and may be early.
                while (left_s := due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(left_s)
                group.create_task(self._request(figures, bounds.timeout_s, due_s))

    async def _request(self, figures: LoadFigures, timeout_s: float, due_s: float | None) -> Result:
        """Sends one request; it has a result unless it is cancelled."""
        body = self._target.body(next(self._prompts), figures.output_tokens)
        reader = StreamReader(self._target.api.read)
        sent_s = time.perf_counter()
        try:
            failure = await self._stream(body, reader, timeout_s)
        except asyncio.CancelledError:
            figures.interrupted += 1
            raise
        ended_s = time.perf_counter()
        result = Result(
            due_s=sent_s if due_s is None else due_s,
            sent_s=sent_s,
            ended_s=ended_s,
            times=reader.times if failure is None else array("d"),
            last_s=ended_s if reader.last_s is None else reader.last_s,
            counts=reader.counts,
            failure=failure,
        )
        figures.add(result)
        return result

    async def _stream(
        self, body: bytes, reader: StreamReader, timeout_s: float
    ) -> tuple[str, str] | None:
        """None, or why it failed."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._client.post(self._target.api.path, body, reader.feed)
        except TimeoutError:
            return "timeout", f"no end after {timeout_s:g} s"
        except RequestError as error:
            return error.kind, str(error)
        if answer.status != 200:
            return f"HTTP {answer.status}", message_of(answer.body)
        reader.close(time.perf_counter())
        return reader.failure
