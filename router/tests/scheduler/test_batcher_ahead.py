"""Steps that are launched before the one before is done."""

import asyncio
from typing import Any

import pytest
from text_generation_router.request import FinishReason

from router.tests.fake_shards import FakeShards, expected_ids, writes
from router.tests.scheduling import Failing, Gate, Rig, collect, running
from router.tests.waiting import until

PROMPT = (1, 2, 3)


def slow(**options: Any) -> FakeShards:
    """Shards whose steps take long enough for the next one to be launched."""
    return FakeShards(turns=10, **options)


def num_ahead(shards: FakeShards) -> int:
    """Of the steps so far, how many were launched ahead."""
    return sum(plan.is_ahead for plan in shards.plans)


async def test_one_request_alone() -> None:
    async with running(slow(), runs_ahead=True) as rig:
        outcome = await rig.outcome(PROMPT, 9)
        assert outcome.ids == expected_ids(PROMPT, 9)
        # A Prefill, a Decode behind it, and the others; none is computed for nothing.
        assert [method for method, _ in rig.shards.calls] == ["prefill"] + ["decode"] * 8
        assert num_ahead(rig.shards) == 7


async def test_never_where_the_router_has_no_core() -> None:
    async with running(slow()) as rig:
        assert (await rig.outcome(PROMPT, 9)).ids == expected_ids(PROMPT, 9)
        assert num_ahead(rig.shards) == 0


@pytest.mark.parametrize("speculate", [1, 2, 20])
async def test_with_draft_tokens(speculate: int) -> None:
    """The number of tokens of the step before is unknown, and all steps but two are ahead of it."""
    async with running(slow(), runs_ahead=True, speculate=speculate) as rig:
        outcomes = await asyncio.gather(*(rig.outcome((n, 2, 3), 40) for n in range(3)))
        assert [o.ids for o in outcomes] == [expected_ids((n, 2, 3), 40) for n in range(3)]
        assert num_ahead(rig.shards) == len(rig.shards.plans) - 2
        drafting = [plan for plan in rig.shards.plans if plan.is_ahead]
        assert {plan.speculate for plan in drafting} == {speculate}
        assert len(rig.shards.passes) < 30


async def test_an_unforeseen_end() -> None:
    shards = slow(script=writes("abc"))
    async with running(shards, runs_ahead=True) as rig:
        outcome = await rig.outcome(PROMPT, 20)
        assert outcome.generated is not None
        assert outcome.generated.finish_reason is FinishReason.EOS_TOKEN
        await rig.settle()
        # The last step found no row, and did nothing.
        assert len(shards.passes) == 4 and len(shards.plans) == 5
        steps = rig.metrics.batch_inference_success.value(method="decode")
        assert steps == 4 == rig.metrics.batch_inference_count.value(method="decode")
        assert rig.metrics.batch_forward_duration.count(method="decode") == 3
        assert (await rig.outcome((4, 5), 3)).text == "abc"


@pytest.mark.parametrize("failing", range(1, 7))
async def test_a_step_fails(failing: int) -> None:
    """With the one behind it, if there is one; and the next request is served."""
    shards = slow(hook=Failing(decode=[failing]))
    async with running(shards, runs_ahead=True) as rig:
        outcomes = await asyncio.gather(*(rig.outcome((n, 2), 7) for n in range(2)))
        for n, outcome in enumerate(outcomes):
            assert str(outcome.error) == f"Server error: decode {failing}"
            assert outcome.ids == expected_ids((n, 2), failing)
        assert (await rig.outcome((8, 9), 7)).ids == expected_ids((8, 9), 7)


async def test_the_server_stops() -> None:
    gate = Gate("decode")
    shards = slow(hook=gate)
    rig: Rig
    async with running(shards, runs_ahead=True) as rig:
        entry = rig.submit(PROMPT, 9)
        await until(lambda: shards.num_under_way == 2)
        await rig.batcher.close()
        assert (await collect(entry)).error is not None
        await until(lambda: not shards.is_busy)
        shards.batches.clear()
