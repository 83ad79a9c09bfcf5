"""Shards that hang are noticed; those that only take long are left alone."""

import asyncio

import pytest
from text_generation_router.errors import GenerationError
from text_generation_router.scheduler import watch
from text_generation_router.scheduler.chunked_prefill import StepCosts
from text_generation_router.scheduler.shards import Advance, LostStepError, SilentShardError
from text_generation_router.scheduler.watch import STUCK_S, WatchedShards, longest_call_s

from router.tests.scheduling import (
    FakeShards,
    collect,
    expected_ids,
    make_request,
    make_rig,
    running,
)

# In the tests everything is a hundred times as quick.
PATIENCE_S = 0.05


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(watch, "ANSWER_S", PATIENCE_S)


class Stub(FakeShards):
    """Shards whose calls take as long as they are told, and whose health does, too."""

    def __init__(self, call_s: float = 0.0, answers: tuple[float, ...] = ()) -> None:
        super().__init__(hook=self._wait)
        self.call_s = call_s
        # How long each answer to the question for health takes; the last one stays.
        self.answers = list(answers) or [0.0]
        self.num_questions = 0

    async def _wait(self, method: str) -> None:
        if method != "health":
            await asyncio.sleep(self.call_s)
            return
        self.num_questions += 1
        await asyncio.sleep(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])


async def test_nobody_is_asked_while_calls_are_short() -> None:
    shards = Stub()
    async with running(shards) as rig:
        outcome = await rig.outcome((1, 2), 9)
        assert outcome.ids == expected_ids((1, 2), 9)
        await asyncio.sleep(2 * PATIENCE_S)
        assert rig.watch._timer is None, "it goes on looking although nothing runs"
    assert shards.num_questions == 0


async def test_a_long_call_is_left_alone_while_the_shards_answer() -> None:
    shards = Stub(call_s=5 * PATIENCE_S)
    watched = WatchedShards(shards)
    await watched.clear_cache(None)
    assert shards.num_questions >= 3
    assert watched.verdict is None


async def test_a_question_that_fails_in_any_way_is_not_answered() -> None:
    """It must not end the watch: nobody waits for the task that asks."""
    shards = Stub(3600.0)

    async def fail() -> None:
        shards.num_questions += 1
        raise RuntimeError("no such channel")

    shards.health = fail  # type: ignore[method-assign]
    watched = WatchedShards(shards)
    with pytest.raises(LostStepError, match="The shards have not answered for"):
        await asyncio.wait_for(watched.clear_cache(None), 100 * PATIENCE_S)
    assert shards.num_questions == watch.NUM_QUESTIONS


async def test_one_late_answer_proves_nothing() -> None:
    """As when the whole machine was asleep."""
    shards = Stub(5 * PATIENCE_S, (3600.0, 0.0))
    watched = WatchedShards(shards)
    await watched.clear_cache(None)
    assert shards.num_questions >= 3
    assert watched.verdict is None


async def test_a_call_that_ends_while_they_are_asked_is_not_given_up() -> None:
    shards = Stub(1.5 * PATIENCE_S, (3600.0,))
    watched = WatchedShards(shards)
    await watched.clear_cache(None)
    await asyncio.sleep(4 * PATIENCE_S)
    assert shards.num_questions > 0
    assert watched.verdict is None


@pytest.mark.parametrize(
    ("answer_s", "longest_s", "verdict"),
    [
        (3600.0, STUCK_S, "The shards have not answered for 0 s"),
        (0.0, 3 * PATIENCE_S, "The shards have not finished a step within 0 s"),
    ],
)
async def test_who_hangs_is_given_up_for_good(
    answer_s: float, longest_s: float, verdict: str
) -> None:
    shards = Stub(3600.0, (answer_s,))
    watched = WatchedShards(shards, longest_s)
    began = asyncio.get_running_loop().time()
    with pytest.raises(LostStepError, match=verdict):
        await watched.clear_cache(1)
    assert asyncio.get_running_loop().time() - began < 1
    assert watched.verdict == verdict
    shards.call_s = 0.0
    for call in (watched.decode([1], Advance()), watched.filter_batch(1, [1]), watched.health()):
        with pytest.raises(LostStepError, match=verdict):
            await call


async def test_who_alone_does_not_answer_is_given_up_for_good() -> None:
    class OneIsSilent(FakeShards):
        async def clear_cache(self, batch_id: int | None) -> None:
            raise SilentShardError("shard 1 did not answer")

    watched = WatchedShards(OneIsSilent())
    with pytest.raises(SilentShardError):
        await watched.clear_cache(None)
    assert watched.verdict == "shard 1 did not answer"
    with pytest.raises(LostStepError, match="shard 1 did not answer"):
        await watched.decode([1], Advance())


async def test_every_request_gets_its_ending() -> None:
    """Those that run, those that wait and those that come afterwards."""
    shards = Stub()
    rig = make_rig(shards, max_batch_size=2)
    task = asyncio.create_task(rig.batcher.run())
    entries = [rig.batcher.submit(make_request((n,), 50)) for n in range(4)]
    await rig.until(lambda: bool(shards.batches))
    shards.call_s, shards.answers = 3600.0, [3600.0]
    outcomes = await asyncio.gather(*map(collect, entries))
    assert all(isinstance(outcome.error, GenerationError) for outcome in outcomes)
    late = await rig.outcome()
    assert "have not answered" in str(late.error)
    assert not rig.batcher.is_healthy
    rig.batcher.integrity()
    rig.check_empty()
    await rig.batcher.close()
    await task


async def test_failures_stay_what_they_are() -> None:
    class Broken(FakeShards):
        async def clear_cache(self, batch_id: int | None) -> None:
            raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await WatchedShards(Broken()).clear_cache(None)


def test_how_long_a_step_may_take() -> None:
    assert longest_call_s(StepCosts(), 128, 4096) == STUCK_S
    slow = StepCosts(decode_step_ns=10**9, num_rows=32, prefill_token_ns=10**8)
    assert longest_call_s(slow, 128, 4096) == 20 * (4 * 1.0 + 409.6)
