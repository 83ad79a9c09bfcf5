"""Many prompts at once, on shards that generate a script."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
from text_generation_router.errors import ValidationError
from text_generation_router.offline import SamplingParams
from text_generation_router.offline.bulk import Job, run_jobs
from text_generation_router.offline.progress import Tally

from router.tests.scheduling import check_integrity
from router.tests.serving import assemble_scripted, script_of


@asynccontextmanager
async def bulk(tmp_path, text="hello ", **options):
    """A function that runs jobs, and running services; at the end nothing may be left."""
    services = assemble_scripted(tmp_path, text, **options)
    task = asyncio.create_task(services.batcher.run())
    try:
        yield partial(run_jobs, services), services
        for _ in range(200):
            if not services.shards.rows:
                break
            await asyncio.sleep(0.01)
        assert not services.shards.rows
        check_integrity(services.batcher.planner)
        assert services.infer.free_permits == services.config.max_concurrent_requests
    finally:
        await services.batcher.close()
        await asyncio.gather(task, return_exceptions=True)
        services.templates.close()


def jobs(*prompts, **given):
    """A job for each prompt, text or ids."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 6} | given)
    asked = params.to_parameters()
    return [
        Job(
            prompt,
            replace(asked, inputs=prompt)
            if isinstance(prompt, str)
            else replace(asked, input_ids=tuple(prompt)),
            params.n,
        )
        for prompt in prompts
    ]


async def test_results_are_in_order_and_whole(tmp_path):
    async with bulk(tmp_path) as (runner, _):
        tally = Tally(3)
        results = await runner(jobs("a", "bcd", [1, 2]), tally)
    assert [result.prompt for result in results] == ["a", "bcd", [1, 2]]
    assert [result.num_prompt_tokens for result in results] == [2, 4, 2]
    for result in results:
        (output,) = result.outputs
        assert output.text == "hello "
        assert output.token_ids == tuple(script_of("hello "))
        assert (output.finish_reason, output.stop_reason) == ("length", None)
        assert output.cumulative_logprob == pytest.approx(-2.1)
        assert output.top_tokens == () and result.prompt_tokens == ()
    assert (tally.done, tally.failed, tally.tokens) == (3, 0, 18)


@pytest.mark.parametrize("num_prompts", [0, 39])
async def test_more_prompts_than_rows_or_none(tmp_path, num_prompts):
    async with bulk(tmp_path, max_batch_size=2) as (runner, _):
        prompts = ["x" * length for length in range(1, num_prompts + 1)]
        results = await runner(jobs(*prompts), Tally(num_prompts))
    assert [result.num_prompt_tokens for result in results] == list(range(2, num_prompts + 2))


async def test_a_prompt_that_fails_does_not_stop_the_others(tmp_path):
    async with bulk(tmp_path) as (runner, _):
        tally = Tally(5)
        results = await runner(jobs("a", "", [10**6], "\ud800", "b"), tally)
    assert [result.error is None for result in results] == [True, False, False, False, True]
    assert all(isinstance(result.error, ValidationError) for result in results[1:4])
    with pytest.raises(ValidationError, match="must be token ids"):
        results[2].outputs  # noqa: B018
    assert (tally.done, tally.failed) == (5, 3)


async def test_cancelling_ends_all(tmp_path):
    async with bulk(tmp_path) as (runner, services):
        task = asyncio.create_task(runner(jobs("a", "b", max_tokens=3000), Tally(2)))
        while len(services.shards.rows) < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
