"""The scheduler as a whole, on shards that check every rule of the contract."""

import asyncio
import math
import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_generation_router.errors import (
    GenerationError,
    IncompleteGenerationError,
    ValidationError,
)
from text_generation_router.request import FinishReason, SamplingParams

from router.tests.scheduling import (
    PAD_ID,
    Failing,
    FakeShards,
    Gate,
    Outcome,
    collect,
    letters,
    make_request,
    make_rig,
    running,
    writes,
)


def expected_ids(prompt: Sequence[int], num: int) -> list[int]:
    return [letters(prompt, place) for place in range(num)]


async def test_one_request() -> None:
    async with running() as rig:
        outcome = await rig.outcome((1, 2, 3), 5)
    assert outcome.ids == expected_ids((1, 2, 3), 5)
    assert outcome.generated.text == outcome.text
    assert outcome.generated.finish_reason is FinishReason.LENGTH
    assert outcome.generated.generated_tokens == 5
    assert outcome.generated.seed is None
    assert [output.token.logprob for output in outcome.tokens] == [-0.25 * n for n in range(1, 6)]
    timings = outcome.tokens[-1].timings
    assert timings.queued <= timings.started
    assert [output.timings for output in outcome.tokens[:-1]] == [None] * 4
    assert [method for method, _ in rig.shards.calls] == ["prefill"] + ["decode"] * 4


async def test_requests_join_and_leave() -> None:
    async with running() as rig:
        prompts = [(n, n + 1) for n in range(1, 20)]
        tasks = []
        for place, prompt in enumerate(prompts):
            tasks.append(asyncio.create_task(rig.outcome(prompt, 1 + place % 7)))
            await rig.turn(place)
        outcomes = await asyncio.gather(*tasks)
    for place, outcome in enumerate(outcomes):
        assert outcome.ids == expected_ids(prompts[place], 1 + place % 7)
    assert rig.metrics.batch_concat.value(reason="backpressure") > 0


async def test_end_of_sequence_is_streamed_but_not_text() -> None:
    async with running(FakeShards(script=writes("hello"))) as rig:
        outcome = await rig.outcome(max_new_tokens=20)
    assert outcome.generated.finish_reason is FinishReason.EOS_TOKEN
    assert (outcome.text, outcome.generated.text) == ("hello</s>", "hello")
    assert outcome.generated.generated_tokens == 6
    assert [output.token.special for output in outcome.tokens] == [False] * 5 + [True]


async def test_a_special_token_in_the_middle_is_not_text() -> None:
    script = [1, 2, PAD_ID, 3]
    shards = FakeShards(script=lambda prompt, place: script[place])
    async with running(shards) as rig:
        outcome = await rig.outcome(max_new_tokens=4)
    assert [output.token.special for output in outcome.tokens] == [False, False, True, False]
    assert outcome.text.replace("<pad>", "") == outcome.generated.text


async def test_a_stop_string_ends_a_request_while_others_go_on() -> None:
    async with running(FakeShards(script=writes("one two three four five", PAD_ID))) as rig:
        stopped, other = await asyncio.gather(rig.outcome((1,), 15, "three"), rig.outcome((2,), 15))
    assert stopped.generated.finish_reason is FinishReason.STOP_SEQUENCE
    assert stopped.text == stopped.generated.text == "one two three"
    assert stopped.generated.generated_tokens == 13
    assert other.text == "one two three f"
    # One decode was under way when the stop string was seen; then only the other is kept.
    assert ("filter", (1,)) in rig.shards.calls


async def test_the_last_request_of_a_batch_stops() -> None:
    async with running(FakeShards(script=writes("stop it"))) as rig:
        outcome = await rig.outcome((1,), 20, "op")
        assert outcome.text == "stop"
    assert rig.shards.calls[-1] == ("clear", (0,))


async def test_length_wins_over_a_stop_string() -> None:
    async with running(FakeShards(script=writes("abc"))) as rig:
        outcome = await rig.outcome((1,), 3, "bc")
    assert outcome.generated.finish_reason is FinishReason.LENGTH
    assert outcome.text == "abc"


async def test_prompt_and_top_tokens() -> None:
    async with running() as rig:
        outcome = await rig.outcome((70, 71), 2, prefill_logprobs=True, top_n_tokens=2)
        plain = await rig.outcome((70, 71), 2)
    assert [(token.id, token.logprob) for token in outcome.prefill.tokens] == [
        (70, None),
        (71, -0.5),
    ]
    assert [len(output.top_tokens) for output in outcome.tokens] == [2, 2]
    assert outcome.tokens[0].top_tokens[0].logprob == -1.0
    assert plain.prefill is None and plain.tokens[0].top_tokens == ()


async def test_top_tokens_belong_to_their_request() -> None:
    async with running() as rig:
        outcomes = await asyncio.gather(
            *(rig.outcome((n,), 3, top_n_tokens=n % 3) for n in range(1, 7))
        )
    for n, outcome in enumerate(outcomes, 1):
        assert [len(output.top_tokens) for output in outcome.tokens] == [n % 3] * 3


async def test_a_seed_is_reported_only_when_it_was_used() -> None:
    async with running() as rig:
        drawn = await rig.outcome(sampling=SamplingParams(do_sample=True, seed=7))
        best = await rig.outcome(sampling=SamplingParams(seed=7))
    assert (drawn.generated.seed, best.generated.seed) == (7, None)


async def test_outputs_that_wait_are_read_together() -> None:
    async with running() as rig:
        entry = rig.batcher.submit(make_request(max_new_tokens=4))
        await rig.settle()
        assert len(await entry.next_outputs()) == 4


# ---- Cancellation ----


async def test_cancel_while_queued_leaves_at_once() -> None:
    gate = Gate("prefill")
    async with running(FakeShards(hook=gate)) as rig:
        first = rig.batcher.submit(make_request())
        await rig.until(lambda: gate.is_reached)
        queued = rig.batcher.submit(make_request())
        assert rig.metrics.queue_size.value == 1
        rig.batcher.cancel(queued)
        rig.batcher.cancel(queued)
        assert rig.metrics.queue_size.value == 0
        gate.open()
        assert (await collect(first)).error is None
        assert isinstance((await collect(queued)).error, IncompleteGenerationError)
    assert [ids for method, ids in rig.shards.calls if method == "prefill"] == [(first.id,)]


@pytest.mark.parametrize("method", ["prefill", "decode"])
@pytest.mark.parametrize("alone", [True, False])
async def test_cancel_while_a_step_is_under_way(method: str, alone: bool) -> None:
    gate = Gate(method)
    async with running(FakeShards(hook=gate)) as rig:
        gone = rig.batcher.submit(make_request((1,), 9))
        others = [] if alone else [rig.batcher.submit(make_request((2,), 9))]
        await rig.until(lambda: gate.is_reached)
        used = rig.metrics.kv_blocks_used.value
        rig.batcher.cancel(gone)
        rig.batcher.integrity()
        assert rig.metrics.kv_blocks_used.value == used, "a step may still write to the blocks"
        gate.open()
        for other in others:
            assert (await collect(other)).ids == expected_ids((2,), 9)
    dropped = ("clear", (0,)) if alone else ("filter", (1,))
    assert dropped in rig.shards.calls


async def test_cancel_during_the_filter_of_another() -> None:
    gate = Gate("filter")
    async with running(FakeShards(hook=gate)) as rig:
        entries = [rig.batcher.submit(make_request((n,), 30)) for n in range(4)]
        await entries[0].next_outputs()
        rig.batcher.cancel(entries[0])
        await rig.until(lambda: gate.is_reached)
        rig.batcher.cancel(entries[1])
        gate.open()
        for n in (2, 3):
            assert (await collect(entries[n])).ids == expected_ids((n,), 30)


async def test_cancel_after_the_end_does_nothing() -> None:
    async with running() as rig:
        entry = rig.batcher.submit(make_request())
        outcome = await collect(entry)
        rig.batcher.cancel(entry)
        assert outcome.generated is not None


# ---- Failures ----


async def test_a_failed_prefill_fails_only_the_new_requests() -> None:
    async with running(FakeShards(hook=Failing(prefill=[2]))) as rig:
        old = rig.batcher.submit(make_request((1,), 20))
        await old.next_outputs()
        new = rig.batcher.submit(make_request((2,), 20))
        failed = await collect(new)
        assert (await collect(old)).generated is not None
        assert rig.batcher.is_healthy
    assert isinstance(failed.error, GenerationError) and failed.tokens == []
    assert str(failed.error) == "Server error: prefill 2"
    assert ("clear", (1,)) in rig.shards.calls
    assert rig.metrics.batch_inference_failure.value(method="prefill") == 1


async def test_a_failed_decode_fails_its_batch_and_the_next_one_runs() -> None:
    async with running(FakeShards(hook=Failing(decode=[3]))) as rig:
        outcomes = await asyncio.gather(*(rig.outcome((n,), 20) for n in range(3)))
        assert not rig.batcher.is_healthy
        for outcome in outcomes:
            assert str(outcome.error) == "Server error: decode 3"
            assert len(outcome.tokens) == 3
        assert (await rig.outcome((9,), 5)).ids == expected_ids((9,), 5)
        assert rig.batcher.is_healthy


@pytest.mark.parametrize("failures", [{"filter": [1]}, {"filter": [1], "clear": [1]}])
async def test_a_failed_filter_fails_the_batch(failures: dict[str, list[int]]) -> None:
    shards = FakeShards(hook=Failing(**failures))
    async with running(shards) as rig:
        entries = [rig.batcher.submit(make_request((n,), 20)) for n in range(3)]
        await entries[0].next_outputs()
        rig.batcher.cancel(entries[0])
        for entry in entries[1:]:
            assert str((await collect(entry)).error) == "Server error: filter 1"
        await rig.turn(20)
        shards.batches.clear()  # what the shard forgets when it starts again
        assert (await rig.outcome((9,), 5)).ids == expected_ids((9,), 5)


async def test_a_failed_clear_is_not_fatal() -> None:
    shards = FakeShards(script=writes("stop"), hook=Failing(clear=[1, 2]))
    async with running(shards) as rig:
        assert (await rig.outcome((1,), 20, "to")).text == "sto"
        await rig.until(lambda: not rig.batcher.is_healthy)
        await rig.turn(20)
        shards.batches.clear()
        assert (await rig.outcome((1,), 20)).text == "stop</s>"


async def test_a_prefill_whose_answer_was_lost_is_noticed() -> None:
    shards = FakeShards()
    lose = False
    compute = shards.prefill

    async def prefill(*arguments: object) -> object:
        result = await compute(*arguments)
        if lose:
            raise GenerationError("Could not connect to Text Generation server: reset")
        return result

    shards.prefill = prefill
    async with running(shards) as rig:
        old = rig.batcher.submit(make_request((1,), 20))
        await old.next_outputs()
        lose = True
        lost = await rig.outcome((2,), 20)
        assert "reset" in str(lost.error)
        assert "other requests" in str((await collect(old)).error)
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
    entries = [rig.batcher.submit(make_request()) for _ in range(2)]
    with pytest.raises(ZeroDivisionError):
        await rig.batcher.run()
    for entry in entries:
        assert (await collect(entry)).error.message.endswith("internal error")
    with pytest.raises(GenerationError, match="internal error"):
        rig.batcher.submit(make_request())
    assert not rig.batcher.is_healthy and not await rig.batcher.probe()
    assert "bug in the router" in caplog.text
    rig.batcher.integrity()
    rig.check_empty()
    await rig.batcher.close()


@pytest.mark.parametrize("method", ["prefill", "decode", "filter"])
@pytest.mark.parametrize("gently", [True, False])
async def test_the_end_of_run_is_everyones_end(method: str, gently: bool) -> None:
    gate = Gate(method)
    rig = make_rig(FakeShards(hook=gate))
    entries = [rig.batcher.submit(make_request((n,), 9)) for n in range(3)]
    run = asyncio.create_task(rig.batcher.run())
    if method == "filter":
        await entries[0].next_outputs()
        rig.batcher.cancel(entries[0])
    await rig.until(lambda: gate.is_reached)
    if gently:
        await asyncio.wait_for(rig.batcher.close(), 1)
        await run
    else:
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    for entry in entries:
        assert isinstance((await collect(entry)).error, IncompleteGenerationError)
    with pytest.raises(IncompleteGenerationError):
        rig.batcher.submit(make_request())
    assert not rig.batcher.is_healthy
    rig.batcher.integrity()
    rig.check_empty()


@pytest.mark.parametrize("starts", [True, False])
async def test_close_before_run(starts: bool) -> None:
    rig = make_rig()
    entry = rig.batcher.submit(make_request())
    run = asyncio.create_task(rig.batcher.run() if starts else asyncio.sleep(0))
    await rig.batcher.close()
    done, _ = await asyncio.wait({run}, timeout=1)
    assert done
    assert isinstance((await collect(entry)).error, IncompleteGenerationError)


@pytest.mark.parametrize("turns", range(12))
async def test_nothing_is_left_behind(turns: int) -> None:
    rig = make_rig()
    entry = rig.batcher.submit(make_request(max_new_tokens=50))
    run = asyncio.create_task(rig.batcher.run())
    await rig.turn(turns)
    await rig.batcher.close()
    await run
    await rig.turn()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert isinstance((await collect(entry)).error, IncompleteGenerationError)
    rig.check_empty()


# ---- Blocks ----


async def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    async with running(FakeShards(num_blocks=4, block_size=4)) as rig:
        with pytest.raises(ValidationError, match=r"<= 16.* 10 `inputs` tokens and 7 `max_new_t"):
            rig.batcher.submit(make_request(range(10), 7))
        assert len((await rig.outcome(range(10), 6)).ids) == 6


async def test_the_token_limit_bounds_the_blocks() -> None:
    async with running(max_batch_total_tokens=35) as rig:
        with pytest.raises(ValidationError, match="<= 32"):
            rig.batcher.submit(make_request(range(10), 23))
        assert rig.metrics.batch_max_total_tokens.value == 32
    with pytest.raises(ValueError, match="max-batch-total-tokens"):
        async with running(max_batch_total_tokens=3):
            pass


async def test_64_requests_in_hardly_any_memory_write_what_they_write_alone() -> None:
    choose = random.Random(0)
    shards = FakeShards(num_blocks=12, block_size=4)
    asked = [
        (tuple(choose.choices(range(200), k=choose.randint(1, 20))), choose.randint(1, 25))
        for _ in range(64)
    ]
    async with running(shards, max_batch_size=8, max_batch_prefill_tokens=24) as rig:
        shards.max_rows = 8
        outcomes = await asyncio.gather(*(rig.outcome(*arguments) for arguments in asked))
    for (prompt, num), outcome in zip(asked, outcomes, strict=True):
        assert outcome.ids == expected_ids(prompt, num)
        assert len(outcome.generated.text) == num
    assert rig.metrics.request_preempted.value() > 10


async def test_preemption_takes_the_newest_and_keeps_the_order() -> None:
    shards = FakeShards(num_blocks=6, block_size=4)
    async with running(shards) as rig:
        first = asyncio.create_task(rig.outcome(range(6), 18))
        await rig.turn()
        others = [asyncio.create_task(rig.outcome((n,), 6)) for n in range(2)]
        outcomes = await asyncio.gather(first, *others)
    assert [len(outcome.ids) for outcome in outcomes] == [18, 6, 6]
    # The oldest is never computed again.
    prefills = [ids for method, ids in shards.calls if method == "prefill"]
    assert sum(0 in ids for ids in prefills) == 1
    assert all(list(ids) == sorted(ids) for ids in prefills)


async def test_a_preempted_request_can_stop_or_leave_while_queued() -> None:
    shards = FakeShards(num_blocks=5, block_size=2, script=writes("abcdefghijklmn"))
    async with running(shards) as rig:
        long = rig.batcher.submit(make_request((1, 2), 8))
        short = rig.batcher.submit(make_request((3,), 8, prefill_logprobs=True))
        await rig.until(lambda: rig.metrics.request_preempted.value() > 0)
        rig.batcher.cancel(short)
        assert (await collect(long)).text == "abcdefgh"


async def test_a_stop_string_in_the_token_that_causes_the_preemption() -> None:
    """The token is known to the scheduler before its text is: the entry ends in the queue."""
    for stop in "bcdefgh":
        shards = FakeShards(num_blocks=5, block_size=2, script=writes("abcdefghijklmn"))
        async with running(shards) as rig:
            long, short = await asyncio.gather(
                rig.outcome((1, 2), 8), rig.outcome((3,), 8, stop, prefill_logprobs=True)
            )
        assert (long.text, short.text) == ("abcdefgh", "abcdefgh"[: "abcdefgh".index(stop) + 1])
        assert len(short.prefill.tokens) == 1


# ---- Who joins when ----


def prefills(rig: object) -> list[tuple[int, ...]]:
    return [ids for method, ids in rig.shards.calls if method == "prefill"]


async def test_few_wait_until_enough_steps_have_passed() -> None:
    async with running(waiting_served_ratio=1.5, max_waiting_tokens=6) as rig:
        old = [rig.batcher.submit(make_request((n,), 20)) for n in range(2)]
        await old[0].next_outputs()
        new = [rig.batcher.submit(make_request((n,), 20)) for n in range(2)]
        await asyncio.gather(*map(collect, [*old, *new]))
    methods = [method for method, _ in rig.shards.calls]
    assert methods[:7] == ["prefill", *["decode"] * 5, "prefill"]
    assert rig.metrics.batch_concat.value(reason="wait_exceeded") == 1
    assert rig.metrics.batch_concat.value(reason="backpressure") == 0


async def test_many_do_not_wait() -> None:
    async with running(waiting_served_ratio=1.5, max_waiting_tokens=100) as rig:
        old = [rig.batcher.submit(make_request((n,), 20)) for n in range(2)]
        await old[0].next_outputs()
        new = [rig.batcher.submit(make_request((n,), 20)) for n in range(3)]
        await asyncio.gather(*map(collect, [*old, *new]))
    assert prefills(rig) == [(0, 1), (2, 3, 4)]
    assert rig.metrics.batch_concat.value(reason="backpressure") == 1


async def test_a_join_is_followed_by_a_decode() -> None:
    async with running(max_batch_prefill_tokens=4) as rig:
        await asyncio.gather(*(rig.outcome((1, 2, 3), 20) for _ in range(6)))
    methods = [method for method, _ in rig.shards.calls]
    # The first prefill has nobody to hold up, every other one has.
    assert methods[:8] == ["prefill", "prefill", *["decode", "prefill"] * 3]
    assert max(map(len, prefills(rig))) == 1


async def test_rows_are_limited() -> None:
    async with running(FakeShards(max_rows=3), max_batch_size=3) as rig:
        outcomes = await asyncio.gather(*(rig.outcome((n,), 5) for n in range(10)))
    assert all(outcome.error is None for outcome in outcomes)
    assert max(map(len, prefills(rig))) == 3


async def test_an_endless_ratio_is_no_crash() -> None:
    async with running(waiting_served_ratio=math.inf, max_waiting_tokens=5) as rig:
        await asyncio.gather(*(rig.outcome((n,), 9) for n in range(5)))


# ---- Metrics ----


async def test_what_a_step_leaves_in_the_metrics() -> None:
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


async def test_the_time_of_a_filter_counts_with_the_delivery() -> None:
    async def slow(method: str) -> None:
        await asyncio.sleep(0.05 if method == "filter" else 0)

    async with running(FakeShards(hook=slow)) as rig:
        entries = [rig.batcher.submit(make_request((n,), 20)) for n in range(2)]
        await entries[0].next_outputs()
        rig.batcher.cancel(entries[0])
        await collect(entries[1])
    page = rig.metrics.render().decode()
    [seconds] = re.findall(r'tgi_batch_filter_duration_sum{method="decode"} (\S+)', page)
    assert 0.05 <= float(seconds) < 1


# ---- Anything can happen ----

_EVENT = st.one_of(
    st.tuples(
        st.just("submit"),
        st.lists(st.integers(0, 250), min_size=1, max_size=12),
        st.integers(1, 14),
        st.sampled_from(["", "a", "mn", "zz"]),
    ),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("fail"), st.sampled_from(["prefill", "decode", "filter", "clear"])),
    st.tuples(st.just("turn"), st.integers(1, 30)),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(_EVENT, max_size=40),
    st.integers(7, 20),
    st.integers(1, 6),
    st.floats(0, 2),
    st.integers(1, 8),
)
def test_every_request_gets_its_ending(
    events: list[tuple], num_blocks: int, rows: int, ratio: float, patience: int
) -> None:
    asyncio.run(_play(events, num_blocks, rows, ratio, patience))


async def _play(
    events: list[tuple], num_blocks: int, rows: int, ratio: float, patience: int
) -> None:
    failing: set[str] = set()
    # The only errors there may be: those that were provoked.
    excuses: set[str] = set()
    shards = FakeShards(num_blocks=num_blocks, max_rows=rows)

    async def hook(method: str) -> None:
        if method in failing:
            failing.discard(method)
            if method == "clear":
                shards.batches.pop(shards.calls[-1][1][0], None)  # else nothing ever would
            raise GenerationError(f"Server error: {method}")

    shards.hook = hook
    limits = {"waiting_served_ratio": ratio, "max_waiting_tokens": patience}
    submitted = []
    async with running(shards, max_batch_size=rows, max_batch_prefill_tokens=16, **limits) as rig:
        for kind, *arguments in events:
            if kind == "submit":
                prompt, num, stop = arguments
                stops = (stop,) if stop else ()
                entry = rig.batcher.submit(make_request(prompt, num, *stops))
                submitted.append((prompt, num, stop, entry, asyncio.create_task(collect(entry))))
            elif kind == "cancel" and submitted:
                rig.batcher.cancel(submitted[arguments[0] % len(submitted)][3])
                excuses.add(str(IncompleteGenerationError()))
            elif kind == "fail":
                failing.add(arguments[0])
                excuses.add(f"Server error: {arguments[0]}")
            else:
                await rig.turn(arguments[0] if arguments else 1)
            rig.batcher.integrity()
        for prompt, num, stop, _, outcome in submitted:
            _check_ending(await outcome, expected_ids(prompt, num), stop, excuses)


def _check_ending(outcome: Outcome, ids: list[int], stop: str, excuses: set[str]) -> None:
    assert outcome.ids == ids[: len(outcome.ids)]
    if outcome.generated is None:
        assert str(outcome.error) in excuses
    elif outcome.generated.finish_reason is FinishReason.STOP_SEQUENCE:
        assert outcome.text.endswith(stop) and outcome.text.count(stop) == 1
    else:
        assert len(outcome.ids) == len(ids)
        assert not stop or stop not in outcome.text[:-1]
