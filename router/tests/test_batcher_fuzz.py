"""Whatever happens in whatever order, every request gets its ending and the right tokens."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from text_generation_router.errors import (
    GenerationError,
    IncompleteGenerationError,
)
from text_generation_router.request import FinishReason

from router.tests.scheduling import (
    FakeShards,
    Outcome,
    collect,
    expected_ids,
    make_request,
    running,
)

_EVENT = st.one_of(
    st.tuples(
        st.just("submit"),
        st.lists(st.integers(0, 250), min_size=1, max_size=12),
        st.integers(1, 14),
        st.sampled_from(["", "a", "mn", "zz"]),
        st.integers(1, 5),
    ),
    st.tuples(st.just("cancel"), st.integers(0, 60)),
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
                prompt, longest, stop, num_sequences = arguments
                lengths = [max(1, longest - 3 * place) for place in range(num_sequences)]
                stops = (stop,) if stop else ()
                requests = [make_request(prompt, num, *stops) for num in lengths]
                entries = rig.batcher.submit_many(requests)
                for num, entry in zip(lengths, entries, strict=True):
                    outcome = asyncio.create_task(collect(entry))
                    submitted.append((prompt, num, stop, entry, outcome))
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
