"""Many prompts at once, on shards that generate a script."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
from text_generation_router.offline import SamplingParams
from text_generation_router.offline import bulk as bulk_module
from text_generation_router.offline.bulk import Job, Tally, run_jobs

from router.tests.scheduling import check_integrity
from router.tests.serving import assemble_scripted


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


@pytest.mark.parametrize("num_prompts", [0, 39])
async def test_more_prompts_than_rows_or_none(tmp_path, num_prompts):
    async with bulk(tmp_path, max_batch_size=2) as (runner, _):
        prompts = ["x" * length for length in range(1, num_prompts + 1)]
        tally = Tally(num_prompts)
        results = await runner(jobs(*prompts), tally)
    assert (tally.done, tally.failed, tally.tokens) == (num_prompts, 0, num_prompts * 6)
    assert [result.num_prompt_tokens for result in results] == list(range(2, num_prompts + 2))


async def test_cancelling_ends_all(tmp_path):
    async with bulk(tmp_path) as (runner, services):
        task = asyncio.create_task(runner(jobs("a", "b", max_tokens=3000), Tally(2)))
        while len(services.shards.rows) < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_the_rate_counts_the_tokens_of_this_run(monkeypatch):
    tally = Tally(100, done=50, started=0.0)
    monkeypatch.setattr(bulk_module.time, "perf_counter", lambda: 10.0)
    assert tally.rate == "0 tokens/s"
    tally.tokens, tally.failed = 12_340, 2
    assert tally.rate == "1,234 tokens/s, 2 failed"
