"""Several sequences over one prompt: computed once, shared, never written to by two."""

import asyncio

import pytest

from router.tests.scheduling import (
    FakeShards,
    Outcome,
    collect,
    expected_ids,
    make_request,
    running,
)


async def outcomes_of(entries: list) -> list[Outcome]:
    return list(await asyncio.gather(*map(collect, entries)))


@pytest.mark.parametrize("shares_prefixes", [True, False])
async def test_a_preempted_sequence_shares_again_when_it_comes_back(shares_prefixes: bool) -> None:
    shards = FakeShards(num_blocks=10, block_size=4)
    async with running(shards, shares_prefixes=shares_prefixes) as rig:
        lengths = [25, 9, 12, 12]
        requests = [make_request(range(9), num) for num in lengths]
        outcomes = await outcomes_of(rig.batcher.submit_many(requests))
    for num, outcome in zip(lengths, outcomes, strict=True):
        assert outcome.ids == expected_ids(range(9), num)
    # The last two come back with 17 tokens, of which 16 were computed by the first, that writes the
    # same; 8 of them as the prompt.
    assert rig.metrics.request_preempted.value == 2
    assert rig.shards.num_computed == 9 + 3 + 2 * 1


async def test_only_the_first_tells_of_the_prompt() -> None:
    told, plain = (make_request(range(9), 3, prefill_logprobs=asked) for asked in (True, False))
    async with running() as rig:
        outcomes = await outcomes_of(rig.batcher.submit_many([told, plain]))
        with pytest.raises(AssertionError, match="the first"):
            rig.batcher.submit_many([plain, told])
    assert len(outcomes[0].prefill.tokens) == 9 and outcomes[1].prefill is None
