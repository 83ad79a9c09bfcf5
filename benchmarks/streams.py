"""Thousands of streaming clients in a process of their own, for router.py."""

import asyncio
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event

import uvloop
from text_generation_benchmark.http import HttpClient
from text_generation_benchmark.load import Bounds, Load
from text_generation_benchmark.streams import APIS

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Streams:
    """The load: the requests and the number of concurrent streams."""

    port: int
    api: str
    streams: int
    new_tokens: int
    """On average; the number of each request is random, from half of it to one and a half."""
    seed: int

    def bodies(self) -> Iterator[bytes]:
        """Requests without an end."""
        chooser, average = random.Random(self.seed), self.new_tokens
        while True:
            new_tokens = chooser.randint((average + 1) // 2, average + average // 2)
            prompt = f"Question {chooser.randrange(10**9)}: what do the clients wait for?"
            yield json.dumps(APIS[self.api].body(prompt, new_tokens, "", True)).encode()


@dataclass(frozen=True, slots=True)
class Tally:
    """The result of all clients."""

    requests: int
    first_token_s: list[float]
    error: str
    """Of the first request that failed; empty: none."""


@dataclass(frozen=True, slots=True)
class Control:
    """Controls the clients' process."""

    events: "Synchronized[int]"
    first_tokens: "Synchronized[int]"
    stop: Event
    tally: "Connection[Tally, None]"
    """Sent once, at the end."""


def run(load: Streams, control: Control) -> None:
    """The clients' process."""
    uvloop.run(_run(load, control))


async def _run(load: Streams, control: Control) -> None:
    client = HttpClient(f"http://127.0.0.1:{load.port}")
    generator = Load(client, APIS[load.api], load.bodies())
    bounds = Bounds(sys.maxsize, math.inf, TIMEOUT_S)
    clients = asyncio.create_task(generator.closed_loop(load.streams, bounds))
    while not control.stop.is_set():
        await asyncio.sleep(0.01)
        running = sum(stream.num_events for stream in generator.running)
        control.events.value = generator.num_events + running
        begun = sum(1 for stream in generator.running if stream.times)
        control.first_tokens.value = len(generator.ended) + begun
    clients.cancel()
    await asyncio.wait([clients])
    begun_streams = [one for one in (*generator.ended, *generator.running) if one.times]
    failures = [": ".join(one.failure) for one in generator.ended if one.failure is not None]
    failures += [
        f"a stream of {stream.output_tokens} tokens had {len(stream.times)} events"
        for stream in generator.ended
        if stream.output_tokens != len(stream.times)
    ]
    first_token_s = [stream.times[0] - stream.sent_s for stream in begun_streams]
    error = failures[0] if failures else ""
    control.tally.send(Tally(len(generator.ended), first_token_s, error))
