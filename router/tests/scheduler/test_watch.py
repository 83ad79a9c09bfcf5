"""Shards that hang are detected; slow ones go on."""

import asyncio

import pytest
from text_generation_router.client import recovery
from text_generation_router.client.recovery import WatchedShards
from text_generation_router.scheduler.costs import UNMEASURED_S, StepCosts, StepDeadlines
from text_generation_router.scheduler.step import GoneShardError, LostStepError, StepResult

from router.tests.scheduling import (
    FakeShards,
    expected_ids,
    make_decode,
    running,
)
from router.tests.virtual_time import VirtualTime

pytestmark = pytest.mark.usefixtures("clock")
PATIENCE_S = recovery.PATIENCE_S


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


async def test_no_health_check_while_calls_are_short() -> None:
    shards = Stub()
    async with running(shards) as rig:
        outcome = await rig.outcome((1, 2), 9)
        assert outcome.ids == expected_ids((1, 2), 9)
        await asyncio.sleep(2 * PATIENCE_S)
    assert shards.num_questions == 0


async def test_a_long_call_is_left_alone_while_the_shards_answer() -> None:
    shards = Stub(call_s=5 * PATIENCE_S)
    watched = WatchedShards(shards)
    await watched.clear_cache(None)
    assert shards.num_questions >= 2
    assert watched.verdict is None


async def test_a_question_that_fails_in_any_way_is_not_answered() -> None:
    """It must not end the watch: no code awaits the task of the health check."""
    shards = Stub(3600.0)

    async def fail() -> None:
        shards.num_questions += 1
        raise RuntimeError("no such channel")

    shards.health = fail  # type: ignore[method-assign]
    watched = WatchedShards(shards)
    with pytest.raises(LostStepError, match="The shards have not answered for"):
        await watched.clear_cache(None)
    assert shards.num_questions == recovery.NUM_QUESTIONS


async def test_one_late_answer_proves_nothing() -> None:
    """As when the whole machine was asleep."""
    shards = Stub(6 * PATIENCE_S, (3600.0, 0.0))
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
    ("answer_s", "longest_s", "verdict", "lasted_s"),
    [
        (3600.0, UNMEASURED_S, "The shards have not answered for 25 s", 25.25),
        (0.0, 3 * PATIENCE_S, "The shards have not finished a step within 15 s", 15.25),
        (3600.0, PATIENCE_S / 2, "The shards have not finished a step within 2.5 s", 2.75),
    ],
)
async def test_hung_shards_are_given_up_for_good(
    answer_s: float, longest_s: float, verdict: str, lasted_s: float
) -> None:
    shards = Stub(3600.0, (answer_s,))
    watched = WatchedShards(shards, StepDeadlines(longest_s))
    told: list[str] = []
    watched.report_loss = told.append
    began = asyncio.get_running_loop().time()
    with pytest.raises(LostStepError, match=verdict):
        await watched.clear_cache(1)
    assert asyncio.get_running_loop().time() - began == pytest.approx(lasted_s)
    assert str(watched.verdict).startswith(verdict) and told == [verdict]
    shards.call_s = 0.0
    for call in (watched.step(make_decode(), 1), watched.filter_batch(1, [1]), watched.health()):
        with pytest.raises(LostStepError, match=verdict):
            await call


async def test_failures_stay_what_they_are() -> None:
    class Broken(FakeShards):
        async def clear_cache(self, batch_id: int | None) -> None:
            raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await WatchedShards(Broken()).clear_cache(None)


@pytest.mark.parametrize("before_s", [0.0, 0.1, 3.0])
async def test_time_in_which_this_process_stood_still_does_not_count(
    before_s: float, clock: VirtualTime
) -> None:
    """As when all processes were stopped, and go on."""
    shards = Stub(3600.0)
    watched = WatchedShards(shards, StepDeadlines(4.0))
    began = clock.now
    call = watched.clear_cache(None)
    await asyncio.sleep(before_s)
    clock.stand_still(60.0)
    with pytest.raises(LostStepError, match="within 4 s"):
        await call
    assert 60.0 + 4.0 - recovery.LOOK_S <= clock.now - began <= 60.0 + 4.0 + 2 * recovery.LOOK_S


class Slow(FakeShards):
    """Whose calls take as long as they are told, beside one another."""

    call_s = 0.0

    async def decode(self, *_: object) -> StepResult:
        await asyncio.sleep(self.call_s)
        return StepResult((), (), (), (), None)


class Idle(Slow):
    """One that may have ended, and does not say whether it has."""

    may_be_gone = True

    async def health(self) -> None:
        await asyncio.Event().wait()


async def test_every_call_ends_while_idle_shards_are_asked_and_with_their_loss() -> None:
    """In its time, though no answer about their health comes, and no call ends by itself."""
    shards = Idle()

    async def connect(_: object) -> Idle:
        await asyncio.Event().wait()
        raise AssertionError

    watched = WatchedShards(shards, StepDeadlines(1.0), connect)
    await asyncio.sleep(2 * recovery.LOOK_S)
    shards.call_s = 3600.0
    began = asyncio.get_running_loop().time()
    calls = [watched.step(make_decode(), 1), watched.step(make_decode(), 1), watched.health()]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [GoneShardError] * 3
    assert asyncio.get_running_loop().time() - began <= 1.0 + 2 * recovery.LOOK_S
    assert watched.is_down and shards.is_closed
    await watched.close()


async def test_a_call_waits_for_the_one_before() -> None:
    """Its time begins when that has ended."""
    shards = Slow()
    watched = WatchedShards(shards, StepDeadlines(0.3))
    shards.call_s = 0.2
    first = watched.step(make_decode(), 1)
    await asyncio.sleep(0)
    shards.call_s = 0.4
    second = watched.step(make_decode(), 1)
    await asyncio.gather(first, second)
    assert watched.verdict is None
    shards.call_s = 0.3 + 2 * recovery.LOOK_S
    with pytest.raises(LostStepError):
        await watched.step(make_decode(), 1)


async def test_a_prompt_gives_a_step_more_time() -> None:
    shards = Slow()
    shards.call_s = 0.15
    watched = WatchedShards(shards, StepDeadlines(least_s=0.05, token_s=0.01))
    await watched.step(make_decode(40), 1)
    with pytest.raises(LostStepError, match=r"within 0\.2 s"):
        shards.call_s = 3600.0
        await watched.step(make_decode(20), 1)


def test_how_long_a_step_may_take() -> None:
    def measured(costs: StepCosts, speculate: int = 0, is_on_gpu: bool = False) -> StepDeadlines:
        return StepDeadlines.measured(costs, 128, speculate, 4096, is_on_gpu)

    assert measured(StepCosts()).of(4096) == UNMEASURED_S
    quick = StepCosts(10**6, 32, 10**4, 10**3)
    assert measured(quick).of(4096) == 5
    assert measured(quick, is_on_gpu=True).of(4096) == 20
    slow = StepCosts(10**9, 32, 10**8, 10**7)
    # Four times a step of 32 rows; each row, and each prompt token, at the end of 4096 tokens.
    token_s = 0.1 + 4 * 0.01
    deadlines = measured(slow, speculate=1)
    assert deadlines.of(1000) == pytest.approx(20 * (4 + (256 + 1000) * token_s))
    assert deadlines.work_s(1000) == pytest.approx(4 + (256 + 1000) * token_s)
    assert StepDeadlines(2.0).of(4096) == 2.0
    assert StepDeadlines(2.0).behind_ranks(2.0).of(0) == 3.0
    assert deadlines.behind_ranks(2.0) == deadlines
