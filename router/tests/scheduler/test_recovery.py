"""Shards that are lost and replaced: every request has the same tokens as without a loss."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from text_generation_router.client.recovery import WatchedShards
from text_generation_router.errors import (
    DeadlineError,
    GenerationError,
    QueueWaitError,
    UnhealthyError,
)
from text_generation_router.infer import time_limited
from text_generation_router.metrics import Metrics
from text_generation_router.request_options import Deadline
from text_generation_router.scheduler.batcher import Batcher
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.step import (
    CachedBatch,
    GoneShardError,
    GrammarResult,
    LostStepError,
    NoShardsError,
)

from router.tests.scheduling import (
    FakeShards,
    Outcome,
    Rig,
    check_integrity,
    collect,
    expected_ids,
    make_limits,
    make_tokenizer,
)
from router.tests.waiting import until


@dataclass
class Mortal(FakeShards):
    """Shards that end when a test ends them: all calls fail, also calls in flight."""

    end: asyncio.Event = field(default_factory=asyncio.Event)

    def _check(self) -> None:
        if self.end.is_set():
            raise GoneShardError("Could not connect to Text Generation server", "detail")

    @asynccontextmanager
    async def _call(self, *arguments: Any) -> AsyncIterator[None]:
        self._check()
        async with super()._call(*arguments):
            yield
        self._check()

    async def health(self) -> None:
        self._check()
        await super().health()

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        self._check()
        return GrammarResult(min_tokens=len(grammar))

    @property
    def may_be_gone(self) -> bool:
        return self.end.is_set()


class World:
    """A batcher on shards that follow one another."""

    def __init__(self, resumes_streams: bool = True, most_losses: int = 100, **limits: Any) -> None:
        self.make: Callable[[], Mortal] = Mortal
        self.lives: list[Mortal] = [self.make()]
        self.may_come = asyncio.Event()
        self.may_come.set()
        self.failure: Exception | None = None
        self.told: list[str] = []
        self.metrics = Metrics(100, 200)
        self.shards = WatchedShards(
            self.lives[0],
            connect=self._connect,
            note_restart=lambda: self.metrics.restarts.inc(process="shard"),
        )
        self.shards.report_loss = self.told.append
        self.batcher = Batcher(
            self.shards,
            make_tokenizer(),
            self.metrics,
            make_limits(**({"num_blocks": 64} | limits)),
            resumes_streams,
            most_losses,
        )

    async def _connect(self, tell: Callable[[str], None]) -> Mortal:
        await self.may_come.wait()
        if self.failure is not None:
            raise self.failure
        self.lives.append(self.make())
        return self.lives[-1]

    @property
    def rig(self) -> Rig:
        return Rig(self.batcher, self.lives[-1], self.shards, self.metrics)

    def submit(self, *arguments: Any, **options: Any) -> Entry:
        return self.rig.submit(*arguments, **options)

    def lose(self) -> None:
        self.lives[-1].end.set()


@asynccontextmanager
async def world(
    resumes_streams: bool = True, most_losses: int = 100, **limits: Any
) -> AsyncIterator[World]:
    """It runs inside the block; afterwards nothing may be left."""
    made = World(resumes_streams, most_losses, **limits)
    run = asyncio.create_task(made.batcher.run())
    try:
        yield made
        if made.shards.verdict is None:
            await made.rig.settle()
    finally:
        await made.batcher.close()
        await run
        await made.shards.close()
    check_integrity(made.batcher.planner)
    assert all(shards.is_closed for shards in made.lives)


async def has_tokens(world: World, *entries: Entry, num: int = 3) -> None:
    await until(lambda: all(len(entry.token_ids) >= num for entry in entries))


def assert_whole(outcome: Outcome, prompt: Any, num: int) -> None:
    assert outcome.error is None and outcome.ids == expected_ids(prompt, num)


async def test_streams_go_on_and_those_who_wait_do_too() -> None:
    async with world(max_batch_size=2) as w:
        prompts = [(1, 2, 3), (1, 2, 3, 4, 5), (7,), (8, 9)]
        entries = [w.submit(prompt, 20) for prompt in prompts]
        reading = [asyncio.create_task(collect(entry)) for entry in entries]
        await has_tokens(w, *entries[:2])
        w.may_come.clear()
        w.lose()
        await until(lambda: w.shards.is_down)
        await until(lambda: w.metrics.queue_size.value == 4)
        assert w.metrics.kv_blocks_used.value == 0 and not await w.batcher.probe()
        check_integrity(w.batcher.planner)
        late = w.submit((5, 5), 3)
        w.may_come.set()
        for prompt, outcome in zip(prompts, await asyncio.gather(*reading), strict=True):
            assert_whole(outcome, prompt, 20)
        assert_whole(await collect(late), (5, 5), 3)
        assert w.metrics.restarts.value(process="shard") == 1
        assert await w.batcher.probe() and w.told == []


async def test_streams_that_are_not_resumed_end_and_others_do_not() -> None:
    async with world(resumes_streams=False, max_batch_size=2) as w:
        shown, hidden, waiting = (w.submit((n,), 20) for n in range(3))
        hidden.is_shown = False
        await has_tokens(w, shown, hidden)
        w.may_come.clear()
        w.lose()
        outcome = await collect(shown)
        assert isinstance(outcome.error, GenerationError) and 0 < len(outcome.ids) < 20
        assert w.shards.is_down
        w.may_come.set()
        assert_whole(await collect(hidden), (1,), 20)
        assert_whole(await collect(waiting), (2,), 20)


@pytest.mark.slow
async def test_a_request_that_runs_at_every_loss_is_not_computed_for_ever() -> None:
    async with world(max_batch_size=1, most_losses=3) as w:
        guilty, waiting = w.submit((1,), 20), w.submit((2,), 20)
        reading = asyncio.create_task(collect(guilty))
        for times in (1, 2, 3):
            await has_tokens(w, guilty, num=3 * times)
            w.lose()
            await until(lambda times=times: w.shards.num_losses == times)  # type: ignore[misc]
        outcome = await reading
        assert isinstance(outcome.error, GenerationError)
        assert_whole(await collect(waiting), (2,), 20)


async def test_a_loss_is_noticed_by_those_who_do_nothing() -> None:
    async with world() as w:
        assert_whole(await collect(w.submit((1, 2, 3, 4, 5, 6), 5)), (1, 2, 3, 4, 5, 6), 5)
        assert w.metrics.prefix_cache_blocks.value > 0
        w.lose()
        await until(lambda: len(w.lives) == 2 and not w.shards.is_down)
        # What was cached is not any more: the shards would notice it.
        assert_whole(await collect(w.submit((1, 2, 3, 4, 5, 6), 5)), (1, 2, 3, 4, 5, 6), 5)


async def test_a_lost_step_of_shards_that_are_there_fails_alone() -> None:
    async with world() as w:

        async def hook(method: str) -> None:
            if method == "decode" and len(w.lives[0].passes) == 3:
                w.lives[0].hook = None
                raise LostStepError("Server error: shard 1 chose other tokens")

        w.lives[0].hook = hook
        outcome = await collect(w.submit((1,), 30))
        assert isinstance(outcome.error, GenerationError) and "other tokens" in str(outcome.error)
        assert len(w.lives) == 1 and not w.shards.is_down
        assert_whole(await collect(w.submit((2,), 5)), (2,), 5)


async def test_no_shards_any_more() -> None:
    async with world() as w:
        w.failure = GenerationError("they have other KV blocks")
        running, other = w.submit((1,), 200), w.submit((2,), 200)
        await has_tokens(w, running, other)
        w.lose()
        for entry in (running, other):
            error = (await collect(entry)).error
            assert isinstance(error, GenerationError) and "other KV blocks" in str(error)
        assert w.shards.verdict is not None and "other KV blocks" in str(w.shards.verdict)
        with pytest.raises(UnhealthyError):
            w.submit((1,), 3)
        with pytest.raises(NoShardsError):
            await w.shards.wait()
        assert not await w.batcher.probe()


@pytest.mark.usefixtures("clock")
async def test_grammars_wait() -> None:
    async with world() as w:
        w.may_come.clear()
        w.lose()
        await until(lambda: w.shards.is_down)
        asked = asyncio.create_task(w.shards.compile_grammar("abc", 0.05))
        await asyncio.sleep(0.2)
        assert not asked.done(), "the time in which there are no shards does not count"
        w.may_come.set()
        assert (await asked).min_tokens == 3


async def test_a_grammar_ends_with_the_router() -> None:
    for is_lost in (False, True):
        async with world() as w:
            if is_lost:
                w.may_come.clear()
                w.lose()
                await until(lambda: w.shards.is_down)
            else:
                w.lives[0].compile_grammar = lambda *_: asyncio.Event().wait()
            asked = asyncio.create_task(w.shards.compile_grammar("abc", 60.0))
            await asyncio.sleep(0)
            await w.shards.close()
            with pytest.raises(LostStepError):
                await asked
            assert w.shards.verdict is None


async def test_time_passes_while_they_are_awaited() -> None:
    async with world(max_batch_size=1) as w:
        ran, waits, waiting_reason = (w.submit((n,), 20) for n in range(3))
        await has_tokens(w, ran)
        w.may_come.clear()
        w.lose()
        await until(lambda: w.shards.is_down)
        deadline = Deadline(0.3, "X-Request-Timeout", asyncio.get_running_loop().time())
        async with asyncio.timeout(5):
            async with time_limited(w.batcher, [ran], deadline, 0.1):
                with pytest.raises(QueueWaitError):
                    async with time_limited(w.batcher, [waits], None, 0.1):
                        raise AssertionError("its turn never comes")
                # Its turn has come once, so that it is no longer in the queue's time.
                assert isinstance((await collect(ran)).error, DeadlineError)
        assert w.shards.is_down
        check_integrity(w.batcher.planner)
        w.may_come.set()
        assert_whole(await collect(waiting_reason), (2,), 20)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.slow
async def test_losses_at_any_time(seed: int) -> None:
    """Tokens follow the script, and no block is lost, at any moment of the loss."""
    draw = random.Random(seed)
    limits: dict[str, Any] = {
        "max_batch_size": draw.choice([2, 4, 128]),
        "max_batch_prefill_tokens": draw.choice([4, 16, 4096]),
        "num_blocks": 24,
        "max_batch_total_tokens": 96,
        "speculate": draw.choice([0, 0, 2]),
        "runs_ahead": draw.random() < 0.5,
        "num_snapshots": draw.choice([None, 2, 6]),
    }
    if limits["num_snapshots"] is not None:
        limits["speculate"] = 0
    async with world(**limits) as w:

        def make() -> Mortal:
            shards = Mortal(num_blocks=24, num_snapshots=limits["num_snapshots"])
            left = draw.randrange(2, 40)

            async def hook(method: str) -> None:
                nonlocal left
                left -= 1
                if left == 0 and len(w.lives) < 8:
                    shards.end.set()

            shards.hook = hook
            return shards

        w.make = make
        w.lives[0].num_blocks, w.lives[0].num_snapshots = 24, limits["num_snapshots"]
        w.lives[0].hook = make().hook

        async def client(number: int) -> None:
            for _ in range(draw.randrange(200)):
                await asyncio.sleep(0)
            prompt = tuple(draw.randrange(3) for _ in range(draw.randrange(1, 30)))
            num = draw.randrange(1, 40)
            entry = w.submit(prompt, num, prefill_logprobs=draw.random() < 0.2)
            if draw.random() < 0.2:
                for _ in range(draw.randrange(100)):
                    await asyncio.sleep(0)
                w.batcher.cancel(entry)
                return
            assert_whole(await collect(entry), prompt, num)

        first = w.lives[0]
        await asyncio.sleep(0)
        clients = [asyncio.create_task(client(number)) for number in range(25)]
        await has_any(w)
        first.end.set()
        await asyncio.gather(*clients)
        assert len(w.lives) > 1
        check_integrity(w.batcher.planner)


async def has_any(world: World) -> None:
    await until(lambda: bool(world.lives[0].passes))


@pytest.mark.parametrize("num_turns", range(4))
async def test_a_caller_that_ends_when_the_shards_do_has_ended(num_turns: int) -> None:
    async with world() as w:
        is_asked = asyncio.Event()

        async def compile_grammar(grammar: str, timeout_s: float) -> GrammarResult:
            is_asked.set()
            await asyncio.Event().wait()
            raise AssertionError("it is never set")

        w.lives[0].compile_grammar = compile_grammar  # type: ignore[method-assign]
        w.may_come.clear()
        asking = asyncio.create_task(w.shards.compile_grammar("x", 5))
        await is_asked.wait()
        w.shards._declare_lost("lost")
        for _ in range(num_turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking}, timeout=2)
        assert asking.cancelled()
        w.may_come.set()


@pytest.mark.parametrize("num_turns", range(4))
async def test_a_batcher_that_is_closed_when_the_shards_end_has_ended(num_turns: int) -> None:
    w, filtering = World(), asyncio.Event()

    async def filter_batch(batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        filtering.set()
        await asyncio.Event().wait()
        raise AssertionError("it is never set")

    w.lives[0].filter_batch = filter_batch  # type: ignore[method-assign]
    w.may_come.clear()
    run = asyncio.create_task(w.batcher.run())
    entries = [w.submit((1, 2, n), 60) for n in range(2)]
    await has_tokens(w, *entries)
    w.batcher.cancel(entries[0])
    await filtering.wait()
    w.shards._declare_lost("lost")
    for _ in range(num_turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(2):
        await w.batcher.close()
        await run
    await w.shards.close()
    assert (await collect(entries[1])).error is not None
