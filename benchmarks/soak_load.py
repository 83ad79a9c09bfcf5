"""The load of a soak: random requests at random times, and the kills of shards."""

import asyncio
import random
import signal
import time

import psutil
from soak_answers import Answer, Wrong, raise_for_failure
from soak_requests import KINDS, Ask, drawn
from soak_verdict import READY_S, Kill, Outcome
from text_generation_benchmark.http import HttpClient, RequestError

from integration_tests.server import LauncherHandle, has_ended

# A request that has no end after this hangs.
HANG_S = 60.0
# Average arrivals per second; changes from time to time.
RATES = (1.0, 3.0, 8.0, 16.0)
RATE_LASTS_S = 15.0
# The share of clients that disconnect, of those that may.
VANISHING = 0.15
SHARD = "text-generation-server"


class Load:
    """Owns the clients and the outcomes of their requests. Times are seconds since its creation."""

    def __init__(self, handle: LauncherHandle, num_clients: int, seed: int) -> None:
        self.outcomes: list[Outcome] = []
        self.kills: list[Kill] = []
        self._handle = handle
        self._draw = random.Random(seed)
        self._free = asyncio.Semaphore(num_clients)
        self._began = time.monotonic()
        self._client = HttpClient(handle.url)

    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    async def run(self, end_s: float, kill_every_s: float) -> None:
        """Runs until then, and until all requests have ended; no kills with 0."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._arrivals(end_s))
            if kill_every_s:
                group.create_task(self._kill(end_s, kill_every_s))
        self._client.close()

    async def _arrivals(self, end_s: float) -> None:
        """Poisson arrivals; they wait if no client is free."""
        rate, until_s = self._draw.choice(RATES), RATE_LASTS_S
        async with asyncio.TaskGroup() as group:
            while self.now() < end_s and self._handle.process.poll() is None:
                if self.now() > until_s:
                    rate, until_s = self._draw.choice(RATES), self.now() + RATE_LASTS_S
                await asyncio.sleep(self._draw.expovariate(rate))
                await self._free.acquire()
                kind, ask = drawn(self._draw)
                patience_s = HANG_S
                vanishes = KINDS[kind].may_vanish and self._draw.random() < VANISHING
                if vanishes:
                    patience_s = 0.005 * 200 ** self._draw.random()
                group.create_task(self._one(kind, ask, patience_s, vanishes))

    async def _one(self, kind: str, ask: Ask, patience_s: float, vanishes: bool) -> None:
        began_s = self.now()
        result, said, is_typed = "refused" if kind == "bad" else "ok", "", False
        try:
            async with asyncio.timeout(patience_s):
                found = await self._client.request(ask.method, ask.path, ask.content)
            answer = Answer(found.status, found.content_type, found.body)
            raise_for_failure(answer)
            ask.check(answer)
        except TimeoutError:
            result = "vanished" if vanishes else "failed"
            said = "" if vanishes else f"no end after {patience_s:g} s"
        except Wrong as wrong:
            result, said, is_typed = "failed", str(wrong), wrong.is_typed
        except RequestError as error:
            result, said = "failed", f"{error.kind}: {error}"
        except (LookupError, TypeError, AttributeError) as error:
            result, said = "failed", f"the answer has another form: {error!r}"
        finally:
            self._free.release()
        if result == "failed":
            said = f"{ask.method} {ask.path} {ask.content[:300]!r}: {said}"
        self.outcomes.append(Outcome(kind, began_s, self.now(), result, said, is_typed))

    async def _kill(self, end_s: float, every_s: float) -> None:
        """Kills a shard this long after the server became ready: not more often than the launcher's
        limit of restarts allows. Every third one is stopped, as if its machine had halted."""
        while self.now() + every_s < end_s:
            await asyncio.sleep(every_s)
            number = len(self.kills) + 1
            kind = signal.SIGSTOP if number % 3 == 0 else signal.SIGKILL
            kill = Kill(kind.name, self.now())
            self.kills.append(kill)
            try:
                shard = self._handle.child(SHARD)
                shard.send_signal(kind)
            except (AssertionError, psutil.NoSuchProcess):
                return  # the verdict reports it: never ready again
            while not (has_ended(shard) and await self._is_ready(number)):
                if self.now() > kill.at_s + 2 * READY_S:
                    return
                await asyncio.sleep(0.1)
            kill.ready_s = self.now()

    async def _is_ready(self, num_restarts: int) -> bool:
        """Whether the server is ready after this number of restarts."""
        try:
            async with asyncio.timeout(HANG_S):
                metrics = await self._client.request("GET", "/metrics")
                health = await self._client.request("GET", "/health")
        except (RequestError, TimeoutError):
            return False
        said = f'tgi_restarts{{process="shard"}} {num_restarts}\n'
        return said.encode() in metrics.body and health.status == 200
