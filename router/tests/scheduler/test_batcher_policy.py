"""Which requests get blocks and join a step, and the metrics of that."""

import asyncio
import math
import re
from itertools import pairwise

import pytest
from text_generation_router.errors import (
    ValidationError,
)

from router.tests.scheduling import (
    FakeShards,
    collect,
    expected_ids,
    running,
)

# ---- Blocks ----


async def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    async with running(FakeShards(num_blocks=4, block_size=4)) as rig:
        with pytest.raises(ValidationError, match=r"<= 16.* 10 `inputs` tokens and 7 `max_new_t"):
            rig.submit(range(10), 7)
        assert len((await rig.outcome(range(10), 6)).ids) == 6


async def test_the_token_limit_bounds_the_blocks() -> None:
    async with running(max_batch_total_tokens=35) as rig:
        with pytest.raises(ValidationError, match="<= 32"):
            rig.submit(range(10), 23)
        assert rig.metrics.batch_max_total_tokens.value == 32
    with pytest.raises(ValueError, match="max-batch-total-tokens"):
        async with running(max_batch_total_tokens=3):
            pass


# ---- When requests join ----


def prefills(rig: object) -> list[tuple[int, ...]]:
    return [ids for method, ids in rig.shards.calls if method == "prefill"]


async def test_few_wait_until_enough_steps_have_passed() -> None:
    limits = {"waiting_served_ratio": 1.5, "max_waiting_tokens": 6}
    async with running(chunks_prompts=False, **limits) as rig:
        old = [rig.submit((n,), 20) for n in range(2)]
        await anext(old[0])
        new = [rig.submit((n,), 20) for n in range(2)]
        await asyncio.gather(*map(collect, [*old, *new]))
    methods = [method for method, _ in rig.shards.calls]
    assert methods[:7] == ["prefill", *["decode"] * 5, "prefill"]
    assert rig.metrics.batch_concat.value(reason="wait_exceeded") == 1
    assert rig.metrics.batch_concat.value(reason="backpressure") == 0


async def test_many_do_not_wait() -> None:
    limits = {"waiting_served_ratio": 1.5, "max_waiting_tokens": 100}
    async with running(chunks_prompts=False, **limits) as rig:
        old = [rig.submit((n,), 20) for n in range(2)]
        await anext(old[0])
        new = [rig.submit((n,), 20) for n in range(3)]
        await asyncio.gather(*map(collect, [*old, *new]))
    assert prefills(rig) == [(0, 1), (2, 3, 4)]
    assert rig.metrics.batch_concat.value(reason="backpressure") == 1


@pytest.mark.parametrize("chunks_prompts", [True, False])
async def test_joining_delays_no_row(chunks_prompts: bool) -> None:
    """A step with a prompt has a token for every running row."""
    limits = {"max_batch_prefill_tokens": 4, "chunks_prompts": chunks_prompts}
    async with running(**limits) as rig:
        await asyncio.gather(*(rig.outcome((1, 2, n), 20) for n in range(6)))
    assert [method for method, _ in rig.shards.calls][:6] == ["prefill"] * 6
    if not chunks_prompts:
        assert [len(step) for step in rig.shards.passes[:6]] == [1, 2, 3, 4, 5, 6]
    for before, after in pairwise(rig.shards.passes):
        assert before.keys() <= after.keys() or len(after) < len(before)


async def test_with_an_endless_ratio_requests_join_after_the_waiting_steps() -> None:
    limits = {"waiting_served_ratio": math.inf, "max_waiting_tokens": 5}
    async with running(chunks_prompts=False, **limits) as rig:
        outcomes = await asyncio.gather(*(rig.outcome((n,), 9) for n in range(5)))
    assert [outcome.ids for outcome in outcomes] == [expected_ids((n,), 9) for n in range(5)]


# ---- Metrics ----


async def test_each_step_counts_in_the_metrics() -> None:
    async with running() as rig:
        await asyncio.gather(*(rig.outcome((n,), 5) for n in range(3)))
    metrics = rig.metrics
    for method, times in (("prefill", 1), ("decode", 4)):
        assert metrics.batch_inference_count.value(method=method) == times
        assert metrics.batch_inference_success.value(method=method) == times
        assert metrics.batch_inference_duration.count(method=method) == times
        assert metrics.batch_forward_duration.count(method=method) == times
        assert metrics.batch_filter_duration.count(method=method) == times
    assert metrics.request_time_to_first_token_duration.count() == 3
    assert metrics.request_inter_token_latency_duration.count() == 12
    assert metrics.batch_next_size.count() == 1


@pytest.mark.usefixtures("clock")
async def test_the_time_of_a_filter_counts_with_the_delivery() -> None:
    async def slow(method: str) -> None:
        await asyncio.sleep(0.05 if method == "filter" else 0)

    async with running(FakeShards(hook=slow)) as rig:
        entries = [rig.submit((n,), 20) for n in range(2)]
        await anext(entries[0])
        rig.batcher.cancel(entries[0])
        await collect(entries[1])
    page = rig.metrics.render().decode()
    [seconds] = re.findall(r'tgi_batch_filter_duration_sum{method="decode"} (\S+)', page)
    assert float(seconds) == pytest.approx(0.05)
