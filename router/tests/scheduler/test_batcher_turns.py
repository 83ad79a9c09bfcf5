"""The event loop is given back: many clients are served in turns, and probes wait for no step."""

import asyncio

import pytest
from text_generation_router.scheduler import batcher
from text_generation_router.scheduler.step import DELIVERIES_PER_TURN

from router.tests.fake_shards import FakeShards, expected_ids
from router.tests.scheduling import Failing, running


async def test_one_turn_delivers_to_so_many_at_most() -> None:
    num = 3 * DELIVERIES_PER_TURN + 5
    async with running(FakeShards(num_blocks=2000), max_batch_size=num) as rig:
        entries = [rig.submit((1, 2), 9) for _ in range(num)]
        turn = 0
        woken: list[int] = []

        async def count_turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        async def read(number: int) -> list[int]:
            ids: list[int] = []
            while len(ids) < 9:
                outputs = await anext(entries[number])
                woken.append(turn)
                ids += [output.token.id for output in outputs]
            return ids

        counting = asyncio.create_task(count_turns())
        texts = await asyncio.gather(*(read(number) for number in range(num)))
        counting.cancel()
        assert texts == [expected_ids((1, 2), 9)] * num
        # The last of one step and the first of the next can meet in a turn.
        assert max(woken.count(turn) for turn in set(woken)) < 2 * DELIVERIES_PER_TURN


async def test_steps_that_succeed_answer_for_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = FakeShards(num_blocks=2000, hook=Failing(health=[1, 2, 3]))
    async with running(shards) as rig:
        assert not await rig.batcher.probe(), "nothing has succeeded yet"
        entry = rig.submit((1, 2), 2000)
        await anext(entry)
        assert await rig.batcher.probe(), "the shards were asked, though they had just answered"
        monkeypatch.setattr(batcher, "FRESH_S", 0.0)
        assert not await rig.batcher.probe(), "an answer of long ago"
        monkeypatch.undo()
        rig.batcher.cancel(entry)
        await rig.settle()
        assert not await rig.batcher.probe(), "nothing runs that could tell"
        assert await rig.batcher.probe()
