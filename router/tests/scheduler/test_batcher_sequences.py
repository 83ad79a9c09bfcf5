"""Several sequences over one prompt: computed once, shared, never written to by two."""

import asyncio
from collections.abc import Sequence

import pytest
from text_generation_router.errors import ValidationError

from router.tests.scheduling import (
    FakeShards,
    Gate,
    Outcome,
    Rig,
    collect,
    expected_ids,
    make_request,
    running,
)
from router.tests.waiting import until


def submit(rig: Rig, num: int, prompt: Sequence[int], max_new_tokens: int = 5) -> list:
    return rig.batcher.submit_many([make_request(prompt, max_new_tokens)] * num)


async def outcomes_of(entries: list) -> list[Outcome]:
    return list(await asyncio.gather(*map(collect, entries)))


def prefills(rig: Rig) -> list[tuple[int, ...]]:
    return [ids for method, ids in rig.shards.calls if method == "prefill"]


@pytest.mark.parametrize(
    ("length", "num_shared"), [(1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (10, 2)]
)
async def test_the_prompt_is_computed_once(length: int, num_shared: int) -> None:
    """Shared are the blocks of 4 that are full of prompt and do not hold its last token."""
    gate = Gate("decode")
    async with running(FakeShards(hook=gate)) as rig:
        entries = submit(rig, 3, range(length))
        await until(lambda: gate.is_reached)
        rig.batcher.integrity()
        own = length // 4 + 1 - num_shared
        assert rig.metrics.kv_blocks_used.value == num_shared + 3 * own
        assert rig.shards.num_computed == length + 2 * (length - 4 * num_shared)
        assert prefills(rig) == [(0, 1, 2)]
        gate.open()
        for outcome in await outcomes_of(entries):
            assert outcome.ids == expected_ids(range(length), 5)


async def test_more_sequences_than_rows_share_with_those_that_run() -> None:
    async with running(FakeShards(max_rows=2), max_batch_size=2) as rig:
        lengths = [3, 9, 4, 5, 3]
        requests = [make_request(range(10), num) for num in lengths]
        outcomes = await outcomes_of(rig.batcher.submit_many(requests))
    for num, outcome in zip(lengths, outcomes, strict=True):
        assert outcome.ids == expected_ids(range(10), num)
    assert prefills(rig)[0] == (0, 1) and len(prefills(rig)) > 2
    assert rig.shards.num_computed == 10 + 4 * 2


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


async def test_one_that_can_never_fit_refuses_all() -> None:
    async with running(FakeShards(num_blocks=4, block_size=4)) as rig:
        requests = [make_request(range(9), 7), make_request(range(9), 8)]
        with pytest.raises(ValidationError, match="<= 16"):
            rig.batcher.submit_many(requests)
        assert rig.metrics.queue_size.value == 0
