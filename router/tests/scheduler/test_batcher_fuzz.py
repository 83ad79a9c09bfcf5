"""Random events in random order: every request gets its ending and the right tokens."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.errors import (
    GenerationError,
    IncompleteGenerationError,
)
from text_generation_router.request import FinishReason, Request
from text_generation_router.scheduler.costs import StepCosts
from text_generation_router.scheduler.step import LostStepError

from router.tests.fake_shards import EOS_ID, FakeShards, letters
from router.tests.scheduling import Outcome, check_integrity, collect, make_request, running

# Beginnings that texts have in common, so that they find one another's blocks.
_BEGINNINGS = [(), (1,) * 8, (1, 2, 3, 4) * 4, (1,) * 8 + (2,) * 4]
_PROMPT = st.builds(
    lambda beginning, end: (*beginning, *end),
    st.sampled_from(_BEGINNINGS),
    st.lists(st.integers(1, 3), min_size=1, max_size=8),
)
_SUBMIT = st.tuples(
    st.just("submit"),
    _PROMPT,
    st.integers(1, 20),
    st.sampled_from(["", "", "a", "mn", "zz"]),
    st.sampled_from([1, 1, 1, 2, 5]),
    st.booleans(),
    # Goes on from the text of an earlier one.
    st.one_of(st.none(), st.integers(0, 60)),
    # Where its first sequence fails, alone.
    st.sampled_from([None, None, None, 0, 1, 3, 6]),
    # The salt of its part of the prefix cache.
    st.sampled_from(["", "", "", "a", "b"]),
    st.sampled_from([0, 0, 0, -3, 5]),
)
_EVENT = st.one_of(
    _SUBMIT,
    _SUBMIT,
    _SUBMIT,
    st.tuples(st.just("cancel"), st.integers(0, 60)),
    st.tuples(st.just("fail"), st.sampled_from(["prefill", "decode", "filter", "clear", "lost"])),
    # With the longest all requests finish.
    st.tuples(st.just("turn"), st.sampled_from([1, 2, 5, 20, 20, 500])),
)
# Of 4 tokens each; the longest request takes 11.
_NUM_BLOCKS = st.integers(11, 13)

_LIMITS = st.fixed_dictionaries(
    {
        "waiting_served_ratio": st.floats(0, 2),
        "max_waiting_tokens": st.integers(1, 8),
        "max_batch_size": st.integers(2, 6),
        "max_batch_prefill_tokens": st.sampled_from([1, 3, 4, 7, 16, 100]),
        "chunks_prompts": st.booleans(),
        "shares_prefixes": st.booleans(),
        "speculate": st.sampled_from([0, 0, 0, 1, 3, 8]),
        "runs_ahead": st.booleans(),
        # For steps of 1.1 µs: parts of 1 block, of 2 to 4, or no target.
        "costs": st.sampled_from([StepCosts(), StepCosts(1100, 1, 100), StepCosts(1100, 1, 1000)]),
        "recompute_at": st.sampled_from([None, None, 9, 18]),
        "num_snapshots": st.sampled_from([None, None, 0, 1, 3, 8]),
    }
)


def script(prompt: Any, place: int) -> int:
    """Letters, and an end after a while for some prompts."""
    return EOS_ID if place == 3 * sum(prompt) % 29 + 1 else letters(prompt, place)


def expected(request: Request) -> list[int]:
    """The tokens of a request that runs alone."""
    ids = [script(request.input_ids, place) for place in range(request.max_new_tokens)]
    return ids[: ids.index(EOS_ID) + 1] if EOS_ID in ids else ids


# How many turns of the event loop a step takes: with many, the next one is launched before its end.
_TURNS = st.sampled_from([1, 1, 5, 8])


@given(st.lists(_EVENT, min_size=3, max_size=30), _NUM_BLOCKS, _LIMITS, _TURNS)
def test_every_request_gets_its_ending(
    events: list[tuple], num_blocks: int, limits: dict[str, Any], turns: int
) -> None:
    if limits["num_snapshots"] is not None:
        limits["recompute_at"], limits["speculate"] = None, 0
    if limits["recompute_at"] is not None:
        limits["speculate"] = 0  # the fake does not draft across the limit
    asyncio.run(_play(events, num_blocks, limits, turns))


async def _play(events: list[tuple], num_blocks: int, limits: dict[str, Any], turns: int) -> None:
    failing: set[str] = set()
    # Only provoked errors may occur.
    excuses: set[str] = {"Server error: the shard answered for other requests"}
    shards = FakeShards(
        num_blocks=num_blocks,
        max_rows=limits["max_batch_size"],
        script=script,
        recompute_at=limits["recompute_at"],
        num_snapshots=limits["num_snapshots"],
        turns=turns,
        token_ns=limits["costs"].prefill_token_ns,
    )

    async def hook(method: str) -> None:
        if method in failing:
            failing.discard(method)
            if method == "clear":
                # Else nothing ever would.
                for batch_id in shards.calls[-1][1] or list(shards.batches):
                    shards.batches.pop(batch_id, None)
            raise GenerationError(f"Server error: {method}")

    def losing(compute: Any) -> Any:
        async def step(*arguments: Any) -> Any:
            result = await compute(*arguments)
            if "lost" in failing:
                failing.discard("lost")
                raise LostStepError("Server error: lost")
            return result

        return step

    shards.hook = hook
    shards.prefill, shards.decode = losing(shards.prefill), losing(shards.decode)
    submitted = []
    async with running(shards, **limits) as rig:
        for kind, *arguments in events:
            if kind == "submit":
                *arguments, place, fails_at, salt, priority = arguments
                if place is not None and submitted:
                    earlier = submitted[place % len(submitted)][0]
                    text = (*earlier.input_ids, *expected(earlier))[:23]
                    arguments[0] = (*text, arguments[0][-1])
                requests, entries = _submit(rig.batcher, salt, priority, *arguments)
                if fails_at is not None:
                    shards.failing[entries[0].id] = fails_at
                    excuses.add(f"Server error: token {fails_at}")
                for request, entry in zip(requests, entries, strict=True):
                    submitted.append((request, entry, asyncio.create_task(collect(entry))))
            elif kind == "cancel" and submitted:
                rig.batcher.cancel(submitted[arguments[0] % len(submitted)][1])
                excuses.add(str(IncompleteGenerationError()))
            elif kind == "fail":
                failing.add(arguments[0])
                excuses.add(f"Server error: {arguments[0]}")
            else:
                await rig.turn(arguments[0] if kind == "turn" else 1)
            check_integrity(rig.batcher.planner)
        for request, _, outcome in submitted:
            _check_ending(await outcome, request, excuses)


def _submit(
    batcher: Any,
    salt: str,
    priority: int,
    prompt: tuple[int, ...],
    longest: int,
    stop: str,
    num: int,
    asks: bool,
) -> tuple[list[Request], list[Any]]:
    lengths = [max(1, longest - 3 * place) for place in range(num)]
    stops = (stop,) if stop else ()
    requests = [
        make_request(
            prompt,
            length,
            *stops,
            prefill_logprobs=asks and not place,
            cache_salt=salt,
            priority=priority,
        )
        for place, length in enumerate(lengths)
    ]
    return requests, batcher.submit_many(requests)


def _check_ending(outcome: Outcome, request: Request, excuses: set[str]) -> None:
    ids, stops = expected(request), request.asked.stop
    assert outcome.ids == ids[: len(outcome.ids)]
    if outcome.prefill is not None:
        assert request.prefill_logprobs and len(outcome.prefill.tokens) == len(request.input_ids)
    if outcome.generated is None:
        assert str(outcome.error) in excuses
        return
    assert request.prefill_logprobs == (outcome.prefill is not None)
    if outcome.generated.finish_reason is FinishReason.STOP_SEQUENCE:
        assert outcome.text.endswith(stops[0]) and outcome.text.count(stops[0]) == 1
    else:
        assert len(outcome.ids) == len(ids)
        assert not stops or stops[0] not in outcome.text[:-1]
