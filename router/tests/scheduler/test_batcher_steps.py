"""Steps with parts of prompts and with several tokens for one request, as clients see them."""

import asyncio
import re

import pytest
from text_generation_router.scheduler.costs import StepCosts

from router.tests.scheduling import (
    collect,
    expected_ids,
    running,
)

# Steps of 1100 ns (as the fake says), prompt tokens of 275: eight of them stretch a step to three.
COSTS = StepCosts(decode_step_ns=1100, num_rows=1, prefill_token_ns=275)


# ---- Several tokens in one step ----


@pytest.mark.parametrize("speculate", [1, 3, 20])
async def test_drafted_tokens_are_those_that_come_anyway(speculate: int) -> None:
    async with running(speculate=speculate) as rig:
        outcomes = await asyncio.gather(*(rig.outcome((n, 3), 20) for n in range(6)))
    for n, outcome in enumerate(outcomes):
        assert outcome.ids == expected_ids((n, 3), 20)
        assert outcome.generated.generated_tokens == 20
        logprobs = [output.token.logprob for output in outcome.tokens]
        assert logprobs == [-0.1 * (place + 1) for place in range(20)]
    assert len(rig.shards.passes) < 20
    shown = rig.metrics.render().decode()
    found = dict(
        re.findall(r"^tgi_request_skipped_tokens_(sum|count) ([\d.]+)$", shown, re.MULTILINE)
    )
    assert float(found["sum"]) + int(found["count"]) == 120
    assert rig.metrics.request_inter_token_latency_duration.count() == 120 - 6


async def test_the_tokens_of_a_step_come_together() -> None:
    """The client wakes up once for them."""
    async with running(speculate=2) as rig:
        entry = rig.submit((1, 2), 9)
        deliver, sizes = entry.deliver, []
        entry.deliver = lambda outputs: (sizes.append(len(outputs)), deliver(outputs))
        await collect(entry)
    assert sum(sizes) == 9 and len(sizes) == len(rig.shards.passes)
    assert sizes[0] == 1 and max(sizes) == 3


# ---- The prefix cache ----


async def test_a_conversation_that_goes_on_is_computed_from_where_it_was() -> None:
    async with running() as rig:
        first = await rig.outcome(range(10), 10)
        follow_up = (*range(10), *first.ids, 1, 2, 3)
        computed = rig.shards.num_computed
        assert (await rig.outcome(follow_up, 5)).ids == expected_ids(follow_up, 5)
        # 19 of 20 tokens were computed, 4 blocks of them full.
        assert rig.shards.num_computed - computed == 23 - 16
    metrics = rig.metrics
    assert metrics.prefix_cache_queried_tokens.value() == 10 + 23
    assert metrics.prefix_cache_hit_tokens.value() == 16
    assert metrics.prefix_cache_blocks.value == 6
