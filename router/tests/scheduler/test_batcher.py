"""Requests that run, stop, leave and fail, on shards that check the contract."""

import asyncio
from itertools import pairwise

import pytest
from text_generation_router.errors import (
    GenerationError,
    IncompleteGenerationError,
    ShuttingDownError,
    UnhealthyError,
)
from text_generation_router.request import FinishReason
from text_generation_router.scheduler.step import LostStepError

from router.tests.scheduling import (
    BOS_ID,
    Failing,
    FakeShards,
    Gate,
    check_integrity,
    collect,
    expected_ids,
    make_rig,
    running,
    writes,
)
from router.tests.waiting import until


async def test_a_stop_string_ends_a_request_while_others_go_on() -> None:
    async with running(FakeShards(script=writes("one two three four five", BOS_ID))) as rig:
        stopped, other = await asyncio.gather(rig.outcome((1,), 15, "three"), rig.outcome((2,), 15))
    assert stopped.generated.finish_reason is FinishReason.STOP_SEQUENCE
    assert stopped.text == stopped.generated.text == "one two three"
    assert stopped.generated.generated_tokens == 13
    assert other.text == "one two three f"
    # One decode was in flight when the stop string was found; then only the other row is kept.
    assert ("filter", (1,)) in rig.shards.calls


async def test_prompt_and_top_tokens() -> None:
    async with running() as rig:
        outcome = await rig.outcome((70, 71), 2, prefill_logprobs=True, top_n_tokens=2)
        plain = await rig.outcome((70, 71), 2)
    assert [(token.id, token.logprob) for token in outcome.prefill.tokens] == [
        (70, None),
        (71, -0.25),
    ]
    assert [len(output.top_tokens) for output in outcome.tokens] == [2, 2]
    assert outcome.tokens[0].top_tokens[0].logprob == -0.5
    assert plain.prefill is None and plain.tokens[0].top_tokens == ()


async def test_outputs_that_wait_are_read_together() -> None:
    async with running() as rig:
        entry = rig.submit(max_new_tokens=4)
        await rig.settle()
        assert len(await anext(entry)) == 4


# ---- Cancellation ----


@pytest.mark.parametrize("method", ["prefill", "decode"])
@pytest.mark.parametrize("alone", [True, False])
async def test_cancel_while_a_step_is_under_way(method: str, alone: bool) -> None:
    gate = Gate(method)
    async with running(FakeShards(hook=gate)) as rig:
        gone = rig.submit((1,), 9)
        others = [] if alone else [rig.submit((2,), 9)]
        await until(lambda: gate.is_reached)
        used = rig.metrics.kv_blocks_used.value
        rig.batcher.cancel(gone)
        check_integrity(rig.batcher.planner)
        assert rig.metrics.kv_blocks_used.value == used, "a step may still write to the blocks"
        gate.open()
        for other in others:
            assert (await collect(other)).ids == expected_ids((2,), 9)
    # The token of its prefill, and none that came after its end.
    assert len((await collect(gone)).tokens) == (method == "decode")
    dropped = ("clear", (0,)) if alone else ("filter", (1,))
    assert dropped in rig.shards.calls


# ---- Failures ----


async def test_a_failed_prefill_fails_only_the_new_requests() -> None:
    async with running(FakeShards(hook=Failing(prefill=[2, 3]))) as rig:
        old = rig.submit((1,), 20)
        await anext(old)
        failed = [await rig.outcome((n,), 20) for n in (2, 3)]
        assert (await collect(old)).generated is not None
        assert rig.batcher.is_healthy
    for number, outcome in enumerate(failed, 2):
        assert isinstance(outcome.error, GenerationError) and outcome.tokens == []
        assert str(outcome.error) == f"Server error: prefill {number}"
    assert ("clear", (1,)) in rig.shards.calls
    assert rig.metrics.batch_inference_failure.value(method="prefill") == 2
    # A step without newcomers comes between two that fail.
    methods = [method for method, _ in rig.shards.calls if method in ("prefill", "decode")]
    assert all(pair != ("prefill", "prefill") for pair in pairwise(methods[1:]))


async def test_a_failed_decode_fails_its_batch_and_the_next_one_runs() -> None:
    async with running(FakeShards(hook=Failing(decode=[3]))) as rig:
        outcomes = await asyncio.gather(*(rig.outcome((n,), 20) for n in range(3)))
        assert not rig.batcher.is_healthy
        for outcome in outcomes:
            assert str(outcome.error) == "Server error: decode 3"
            assert len(outcome.tokens) == 3
        assert (await rig.outcome((9,), 5)).ids == expected_ids((9,), 5)
        assert rig.batcher.is_healthy


async def test_a_request_may_fail_before_its_prompt_is_computed() -> None:
    """For want of memory; others go on, and what it held is free."""
    prompt = tuple(range(3, 35))
    shards = FakeShards(unfit={1: 8})
    async with running(shards, max_batch_prefill_tokens=8) as rig:
        prompts = [(1, 2), prompt, (3, 4)]
        outcomes = await asyncio.gather(*(rig.outcome(ids, 20) for ids in prompts))
        assert rig.batcher.is_healthy
        assert str(outcomes[1].error) == "Server error: no memory behind 8 tokens"
        assert outcomes[1].tokens == []
        for place in (0, 2):
            assert outcomes[place].ids == expected_ids(prompts[place], 20)
        # Tokens that it has not computed are not shared.
        assert (await rig.outcome(prompt, 4)).ids == expected_ids(prompt, 4)


async def test_a_prefill_whose_answer_was_lost_fails_all_its_rows() -> None:
    """It is not known whether the earlier rows got a token."""
    shards = FakeShards()
    lose = False
    compute = shards.prefill

    async def prefill(*arguments: object) -> object:
        result = await compute(*arguments)
        if lose:
            raise LostStepError("Could not connect to Text Generation server: reset")
        return result

    shards.prefill = prefill
    async with running(shards) as rig:
        old = rig.submit((1,), 20)
        await anext(old)
        lose = True
        lost = await rig.outcome((2,), 20)
        assert "reset" in str(lost.error) and "reset" in str((await collect(old)).error)
        lose = False
        assert (await rig.outcome((3,), 5)).ids == expected_ids((3,), 5)


async def test_health_follows_steps_and_probes() -> None:
    async with running(FakeShards(hook=Failing(prefill=[1], health=[1]))) as rig:
        assert rig.batcher.is_healthy
        assert not await rig.batcher.probe()
        assert await rig.batcher.probe()
        await rig.outcome()
        assert not rig.batcher.is_healthy
        assert await rig.batcher.probe()


async def test_a_bug_fails_everyone_and_the_batcher_for_good(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def bug(method: str) -> None:
        if method == "decode":
            raise ZeroDivisionError

    rig = make_rig(FakeShards(hook=bug))
    entries = [rig.submit() for _ in range(2)]
    with pytest.raises(ZeroDivisionError):
        await rig.batcher.run()
    for entry in entries:
        assert (await collect(entry)).error.message.endswith("internal error")
    with pytest.raises(UnhealthyError):
        rig.submit()
    assert not rig.batcher.is_healthy and not await rig.batcher.probe()
    assert "bug in the router" in caplog.text
    check_integrity(rig.batcher.planner)
    rig.check_empty()
    await rig.batcher.close()


@pytest.mark.parametrize("method", ["prefill", "decode", "filter"])
@pytest.mark.parametrize("gently", [True, False])
async def test_the_end_of_run_is_everyones_end(method: str, gently: bool) -> None:
    gate = Gate(method)
    rig = make_rig(FakeShards(hook=gate))
    entries = [rig.submit((n,), 9) for n in range(3)]
    run = asyncio.create_task(rig.batcher.run())
    if method == "filter":
        await anext(entries[0])
        rig.batcher.cancel(entries[0])
    await until(lambda: gate.is_reached)
    if gently:
        await asyncio.wait_for(rig.batcher.close(), 1)
        await run
    else:
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    for entry in entries:
        assert isinstance((await collect(entry)).error, IncompleteGenerationError)
    with pytest.raises(ShuttingDownError):
        rig.submit()
    assert not rig.batcher.is_healthy
    check_integrity(rig.batcher.planner)
    rig.check_empty()
