"""Steps with parts of prompts and with several tokens for one request, as clients see them."""

import asyncio
import re
from itertools import pairwise

import pytest
from text_generation_router.request import FinishReason
from text_generation_router.scheduler.chunked_prefill import StepCosts

from router.tests.scheduling import (
    EOS_ID,
    Failing,
    FakeShards,
    Gate,
    collect,
    expected_ids,
    make_request,
    running,
    writes,
)
from router.tests.waiting import until

# Steps of 1100 ns (as the fake says), prompt tokens of 275: eight of them stretch a step to three.
COSTS = StepCosts(decode_step_ns=1100, num_rows=1, prefill_token_ns=275)


async def test_a_long_prompt_stops_no_row() -> None:
    """Every decoding row gets a token in each step that computes the prompt."""
    shards = FakeShards(num_blocks=100, token_ns=275)
    async with running(shards, costs=COSTS) as rig:
        old = [rig.batcher.submit(make_request((n,), 40)) for n in range(4)]
        await old[0].next_outputs()
        long = rig.batcher.submit(make_request(range(100, 160), 3))
        assert (await collect(long)).ids == expected_ids(range(100, 160), 3)
        for entry in old:
            await collect(entry)
    parts = [step for step in shards.passes if long.id in step]
    assert [step.pop(long.id) for step in parts] == [4] * 15 + [1, 1]
    assert all(step == dict.fromkeys(range(4), 1) for step in parts)


async def test_the_first_token_comes_with_the_last_part() -> None:
    async with running(max_batch_prefill_tokens=8) as rig:
        outcome = await rig.outcome(range(20), 3, prefill_logprobs=True)
    assert [sum(step.values()) for step in rig.shards.passes] == [8, 8, 4, 1, 1]
    assert len(outcome.prefill.tokens) == 20 and outcome.ids == expected_ids(range(20), 3)


@pytest.mark.parametrize("method", ["prefill", "decode"])
async def test_one_who_leaves_in_the_middle_of_its_prompt(method: str) -> None:
    gate = Gate(method)
    async with running(FakeShards(hook=gate), max_batch_prefill_tokens=8) as rig:
        entry = rig.batcher.submit(make_request(range(30), 3))
        other = rig.batcher.submit(make_request((1, 2), 3))
        await until(lambda: gate.is_reached)
        rig.batcher.cancel(entry)
        gate.open()
        assert (await collect(other)).ids == expected_ids((1, 2), 3)
    assert sum(entry.id in step for step in rig.shards.passes) <= 2


async def test_a_failed_step_with_a_newcomer_leaves_the_others_as_they_were() -> None:
    """The earlier rows get the missed token with the next step."""
    shards = FakeShards(hook=Failing(prefill=[2, 3]))
    async with running(shards) as rig:
        old = [rig.batcher.submit(make_request((n,), 9)) for n in range(3)]
        await old[0].next_outputs()
        newcomers = [await rig.outcome((n, n), 9) for n in (7, 8)]
        assert [outcome.tokens for outcome in newcomers] == [[], []]
        for n, entry in enumerate(old):
            outcome = await collect(entry)
            assert outcome.ids == expected_ids((n,), 9)[-len(outcome.ids) :]
    methods = [method for method, _ in shards.calls if method in ("prefill", "decode")]
    # A step without newcomers comes between two that fail.
    assert all(pair != ("prefill", "prefill") for pair in pairwise(methods[1:]))


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
    found = dict(re.findall(r"^tgi_request_skipped_tokens_(sum|count) (\d+)$", shown, re.MULTILINE))
    assert int(found["sum"]) + int(found["count"]) == 120
    assert rig.metrics.request_inter_token_latency_duration.count() == 120 - 6


async def test_the_tokens_of_a_step_come_together() -> None:
    """The client wakes up once for them."""
    async with running(speculate=2) as rig:
        entry = rig.batcher.submit(make_request((1, 2), 9))
        deliver, sizes = entry.deliver, []
        entry.deliver = lambda *outputs: (sizes.append(len(outputs)), deliver(*outputs))
        await collect(entry)
    assert sum(sizes) == 9 and len(sizes) == len(rig.shards.passes)
    assert sizes[0] == 1 and max(sizes) == 3


async def test_tokens_behind_a_stop_string_are_dropped() -> None:
    for end in range(1, 11):
        text = "abcdefghijkl"
        async with running(FakeShards(script=writes(text)), speculate=8) as rig:
            outcome, other = await asyncio.gather(
                rig.outcome((1,), 12, text[end]), rig.outcome((2,), 12)
            )
        assert outcome.text == outcome.generated.text == text[: end + 1]
        assert outcome.generated.finish_reason is FinishReason.STOP_SEQUENCE
        assert outcome.generated.generated_tokens == end + 1
        assert other.text == text


async def test_the_end_belongs_to_the_last_token() -> None:
    async with running(FakeShards(script=writes("abcdef")), speculate=8) as rig:
        outcome = await rig.outcome((1,), 12)
        short = await rig.outcome((1,), 5)
    assert outcome.ids[-1] == EOS_ID and outcome.generated.text == "abcdef"
    assert outcome.generated.finish_reason is FinishReason.EOS_TOKEN
    assert short.generated.finish_reason is FinishReason.LENGTH and short.text == "abcde"


async def test_top_tokens_go_with_their_tokens() -> None:
    async with running(speculate=4) as rig:
        outcomes = await asyncio.gather(
            *(rig.outcome((n,), 9, top_n_tokens=n % 3) for n in range(1, 5))
        )
    for n, outcome in enumerate(outcomes, 1):
        assert [len(output.top_tokens) for output in outcome.tokens] == [n % 3] * 9


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


async def test_a_block_that_was_not_computed_is_not_shared() -> None:
    """The step that should have written it failed."""
    async with running(FakeShards(hook=Failing(prefill=[1]))) as rig:
        assert (await rig.outcome(range(10), 5)).error is not None
        assert (await rig.outcome(range(10), 5)).ids == expected_ids(range(10), 5)
    assert rig.metrics.prefix_cache_hit_tokens.value() == 0
