"""A batcher on shards that are played, and what its clients get."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from text_generation_process.sampling import Sampling
from text_generation_router.client.recovery import WatchedShards
from text_generation_router.errors import GenerationError, RouterError
from text_generation_router.metrics import Metrics
from text_generation_router.request import (
    GeneratedText,
    GenerateParameters,
    PrefillOutput,
    Request,
    TokenOutput,
)
from text_generation_router.scheduler.batcher import Batcher
from text_generation_router.scheduler.costs import SchedulerLimits
from text_generation_router.scheduler.entry import Entry, EntryState
from text_generation_router.scheduler.planner import Planner
from text_generation_router.scheduler.step import Plan

from router.tests.fake_shards import FakeShards, expected_ids, letters, writes
from router.tests.tiny_tokenizer import BOS_ID, EOS_ID, ids_of, make_tokenizer
from router.tests.waiting import until

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "FakeShards",
    "expected_ids",
    "ids_of",
    "letters",
    "make_tokenizer",
    "writes",
]


def make_request(
    prompt: Sequence[int] = (1, 2, 3), max_new_tokens: int = 5, *stop: str, **options: object
) -> Request:
    """A greedy request; `options` are fields of Request, or of GenerateParameters."""
    own = {name: options.pop(name) for name in Request.__slots__ if name in options}
    asked = GenerateParameters.of(**{"inputs": "", "stop": stop, **options})
    return replace(Request(asked, tuple(prompt), Sampling(), max_new_tokens), **own)


def make_decode(num_prompt_tokens: int = 0, is_ahead: bool = False) -> Plan:
    """The plan of a Decode in which a row computes that much of its prompt."""
    return Plan([], {}, {1: num_prompt_tokens}, frozenset(), is_ahead=is_ahead)


@dataclass(frozen=True)
class Outcome:
    """All that a client was given."""

    tokens: list[TokenOutput]
    prefill: PrefillOutput | None
    generated: GeneratedText | None
    error: RouterError | None

    @property
    def text(self) -> str:
        """The streamed text."""
        return "".join(output.token.text for output in self.tokens)

    @property
    def ids(self) -> list[int]:
        """The streamed ids."""
        return [output.token.id for output in self.tokens]


async def collect(entry: Entry, pause_s: float = 10.0) -> Outcome:
    """Reads an entry to its end; no two outputs are `pause_s` apart."""
    tokens: list[TokenOutput] = []
    while not tokens or tokens[-1].generated is None:
        try:
            outputs = await asyncio.wait_for(anext(entry), pause_s)
        except RouterError as error:
            return Outcome(tokens, entry.prefill, None, error)
        tokens += outputs
    return Outcome(tokens, entry.prefill, tokens[-1].generated, None)


def check_integrity(planner: Planner) -> None:
    """Asserts, between any two steps, that no block is lost or held by another entry's table too,
    unless it is shared, and that entries are in the order of their ranks."""
    running = list(planner.running.values())
    for entries in (list(planner.queue), running):
        ranks = [entry.rank for entry in entries]
        assert ranks == sorted(set(ranks)), "out of order"
    for entry in planner.queue:
        assert entry.state is EntryState.QUEUED and entry.block_table is None
    held = {block_id for entry in running for block_id in entry.block_table or ()}
    assert len(held) == planner.blocks.allocator.num_used, "blocks are lost or held twice"
    for entry in running:
        assert entry.num_computed < entry.num_tokens <= entry.max_context
        if entry.num_computed >= entry.num_inputs:
            assert entry.num_computed == entry.num_tokens - 1


@dataclass(frozen=True)
class Rig:
    """A batcher, its shards, through which it is watched whether they answer, and its metrics."""

    batcher: Batcher
    shards: FakeShards
    watch: WatchedShards
    metrics: Metrics

    def submit(self, *arguments: object, **options: object) -> Entry:
        """Submits `make_request(…)`."""
        [entry] = self.batcher.submit_many([make_request(*arguments, **options)])
        return entry

    async def outcome(self, *arguments: object, **options: object) -> Outcome:
        """Submits `make_request(…)` and reads the answer to its end."""
        return await collect(self.submit(*arguments, **options))

    async def turn(self, times: int = 1) -> None:
        """Gives other tasks `times` turns of the event loop."""
        for _ in range(times):
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Waits until nothing runs; asserts that nothing is lost."""
        await until(lambda: not self.shards.batches and not self.shards.is_busy)
        await self.turn(20)
        assert not self.shards.batches, "rows are left"
        check_integrity(self.batcher.planner)
        self.check_empty()

    def check_empty(self) -> None:
        """Asserts that the gauges say so, and that they add up."""
        metrics = self.metrics
        assert metrics.kv_blocks_used.value == metrics.queue_size.value == 0
        assert metrics.batch_current_size.value == metrics.batch_current_max_tokens.value == 0
        total = metrics.kv_blocks_free.value * self.shards.block_size
        assert total == metrics.batch_max_total_tokens.value


def make_limits(num_blocks: int, **limits: Any) -> SchedulerLimits:
    """`limits` are fields of SchedulerLimits."""
    given: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": 4,
        "max_batch_size": 128,
        "max_batch_prefill_tokens": 4096,
        "max_batch_total_tokens": num_blocks * 4,
        "waiting_served_ratio": 0.0,
        "max_waiting_tokens": 20,
    }
    return SchedulerLimits(**(given | limits))


def make_rig(
    shards: FakeShards | None = None,
    watched: Callable[[FakeShards], WatchedShards] = WatchedShards,
    **limits: Any,
) -> Rig:
    """A batcher that does not run yet; see `make_limits`."""
    shards = shards or FakeShards()
    metrics = Metrics(100, 200)
    own = {"recompute_at": shards.recompute_at, "num_snapshots": shards.num_snapshots}
    scheduler_limits = make_limits(shards.num_blocks, **(own | limits))
    watch = watched(shards)
    batcher = Batcher(watch, make_tokenizer(), metrics, scheduler_limits)
    return Rig(batcher, shards, watch, metrics)


@asynccontextmanager
async def running(shards: FakeShards | None = None, **limits: Any) -> AsyncIterator[Rig]:
    """Runs a batcher; asserts at the end that it is empty and that it stops."""
    rig = make_rig(shards, **limits)
    task = asyncio.create_task(rig.batcher.run())
    try:
        yield rig
        await rig.settle()
    finally:
        await rig.batcher.close()
        await task
    check_integrity(rig.batcher.planner)


class Failing:
    """A hook that fails the given calls, by method and count: `Failing(decode=[2])`."""

    def __init__(self, **failures: Sequence[int]) -> None:
        self._failures = failures
        self._counts: dict[str, int] = {}

    async def __call__(self, method: str) -> None:
        count = self._counts[method] = self._counts.get(method, 0) + 1
        if count in self._failures.get(method, ()):
            raise GenerationError(f"Server error: {method} {count}")


class Gate:
    """A hook that holds calls of one method back until it is opened."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._is_open = asyncio.Event()
        self.is_reached = False

    async def __call__(self, method: str) -> None:
        if method == self._method:
            self.is_reached = True
            await self._is_open.wait()

    def open(self) -> None:
        """Lets the call go on, and all others."""
        self._is_open.set()
