"""Permits, seeds, endings and what is counted, of one and of several sequences."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from text_generation_router.errors import GenerationError, OverloadedError, ValidationError
from text_generation_router.grammar import GrammarCompiler
from text_generation_router.infer import Infer
from text_generation_router.scheduler.entry import Entry
from text_generation_router.validation import GenerateParameters, Limits, Validation

from router.tests.scheduling import (
    FakeShards,
    Gate,
    Rig,
    expected_ids,
    ids_of,
    make_tokenizer,
    running,
)
from router.tests.waiting import until

PROMPT = "the quick brown fox"
LIMITS = Limits(
    max_best_of=4,
    max_stop_sequences=4,
    max_top_n_tokens=5,
    max_input_tokens=99,
    max_total_tokens=200,
    vocab_size=258,
)


def asks(**parameters: object) -> GenerateParameters:
    return GenerateParameters.of(**{"inputs": PROMPT, "max_new_tokens": 6, **parameters})


@dataclass(frozen=True)
class House:
    """An Infer and what it rests on."""

    infer: Infer
    rig: Rig
    shards: FakeShards

    def counted(self) -> dict[str, int]:
        """What has been counted, without the zeros."""
        metrics = self.rig.metrics
        counts = {"success": metrics.request_success.value()}
        for label in ("generation", "validation", "overloaded", "incomplete", "dropped"):
            counts[label] = metrics.request_failure.value(err=label)
        return {label: count for label, count in counts.items() if count}


@asynccontextmanager
async def house(shards: FakeShards | None = None, permits: int = 8) -> AsyncIterator[House]:
    """Asserts at the end that all permits are returned, in addition to `running`."""
    shards = shards or FakeShards()
    async with running(shards) as rig:
        grammars = GrammarCompiler(shards, is_enabled=False)
        validation = Validation(LIMITS, make_tokenizer(), rig.metrics, grammars)
        infer = Infer(rig.batcher, validation, rig.metrics, permits)
        yield House(infer, rig, shards)
        assert infer.free_permits == permits


async def ids_from(entry: Entry) -> list[int]:
    result = await entry.collect()
    return [token.id for token in result.tokens]


async def test_sequences_run_together_over_one_prompt() -> None:
    async with house() as it, it.infer.start_many(asks(), 3) as generations:
        assert it.infer.free_permits == 5
        ids = await asyncio.gather(*map(ids_from, generations))
        assert ids == [expected_ids(ids_of(PROMPT), 6)] * 3
        assert [generation.prompt_tokens for generation in generations] == [19] * 3
    assert it.counted() == {"success": 3}
    # 4 blocks of 4 are shared, 3 tokens are left for each.
    assert it.shards.num_computed == 19 + 2 * 3
    assert it.rig.metrics.request_input_length.count() == 1


@pytest.mark.parametrize("seed", [7, 2**64 - 2])
async def test_each_draws_with_a_seed_of_its_own(seed: int) -> None:
    async with house() as it, it.infer.start_many(asks(seed=seed, do_sample=True), 4) as many:
        results = [await generation.collect() for generation in many]
    seeds = [result.ending.generated.seed for result in results]
    assert seeds == [(seed + place) % 2**64 for place in range(4)]


async def test_permits_for_all_or_none() -> None:
    async with house(permits=3) as it:
        async with it.infer.start_many(asks(), 1):
            with pytest.raises(OverloadedError):
                async with it.infer.start_many(asks(), 3):
                    raise AssertionError("there are two permits only")
            assert it.infer.free_permits == 2
        async with it.infer.start_many(asks(), 3) as generations:
            await asyncio.gather(*map(ids_from, generations))
    assert it.counted() == {"overloaded": 1, "dropped": 1, "success": 3}


async def test_leaving_early_cancels_what_runs() -> None:
    async with house(FakeShards(num_blocks=99)) as it:
        async with it.infer.start_many(asks(max_new_tokens=100), 3) as generations:
            await anext(generations[1])
        await it.rig.settle()
        assert it.counted() == {"dropped": 3}
        # One is read to its end before the others are left.
        short = asks(max_new_tokens=2)
        async with it.infer.start_many(short, 3) as generations:
            await generations[2].collect()
    assert it.counted() == {"dropped": 5, "success": 1}


async def test_a_task_that_is_cancelled_drops_all() -> None:
    gate = Gate("decode")
    async with house(FakeShards(hook=gate)) as it:
        task = asyncio.create_task(it.infer.generate_many(asks(), 3))
        await until(lambda: gate.is_reached)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
    assert it.counted() == {"dropped": 3}


async def test_a_failure_is_raised_where_it_is_iterated(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        house(FakeShards(failing={1: 3})) as it,
        it.infer.start_many(asks(), 3) as generations,
    ):
        assert len(await ids_from(generations[0])) == 6
        with pytest.raises(GenerationError, match="token 3"):
            await generations[1].collect()
        assert len(await ids_from(generations[2])) == 6
    assert it.counted() == {"success": 2, "generation": 1}
    assert caplog.text.count("token 3") == 1


async def test_best_of_takes_the_likeliest_and_tells_of_the_prompt_everywhere() -> None:
    asked = asks(best_of=3, do_sample=True, decoder_input_details=True, top_n_tokens=2)
    async with house() as it:
        best, others = await it.infer.generate_best_of(asked)
        for result in (best, *others):
            assert [token.id for token in result.prefill.tokens] == list(ids_of(PROMPT))
            assert [len(top) for top in result.top_tokens] == [2] * 6
        seeds = {result.ending.generated.seed for result in (best, *others)}
        assert len(seeds) == 3
        with pytest.raises(ValidationError, match=r"<= 4\. Given: 5"):
            await it.infer.generate_best_of(asks(best_of=5, top_k=0))
    assert it.counted() == {"success": 3, "validation": 1}
