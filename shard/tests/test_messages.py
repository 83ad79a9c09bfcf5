"""Messages have their turns in the order of their numbers, in any order of arrival."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from text_generation_shard.errors import BatchError, OwnError
from text_generation_shard.messages import Messages

from shard.tests.ranks import Board, ThreadCollectives


class Rank:
    """Records the messages that are carried out, and those that other ranks need not wait for."""

    def __init__(self, thread: ThreadPoolExecutor, deadline_s: float = 60.0) -> None:
        self.turns, self.failed, self.gaps = list[int](), list[int](), list[int]()
        collectives = ThreadCollectives(Board(1), 0)
        collectives.fail = self.failed.append  # type: ignore[method-assign]
        self.messages = Messages(
            device_thread=thread,
            collectives=collectives,
            deadline_s=deadline_s,
            on_gap=lambda: self.gaps.append(len(self.turns)),
            on_final=lambda _: None,
        )

    def arrive(self, number: int, may_skip: bool = False) -> "asyncio.Future[None]":
        """A message that needs no preparation."""
        self.messages.take(number, may_skip)
        return self.prepare(number)

    def prepare(self, number: int) -> "asyncio.Future[None]":
        return self.messages.run(number, lambda: self.turns.append(number))


@pytest.fixture
async def rank() -> AsyncIterator[Rank]:
    """After message 4."""
    with ThreadPoolExecutor(1) as thread:
        rank = Rank(thread)
        await rank.arrive(4, may_skip=True)
        yield rank
        rank.messages.close()


async def test_each_number_has_one_turn_in_their_order(rank: Rank) -> None:
    calls = [rank.arrive(7), rank.arrive(6)]
    for number in (3, 4, 6):
        with pytest.raises(BatchError, match=f"{number} came again or too late: message 7"):
            rank.arrive(number, may_skip=True)
    with pytest.raises(BatchError, match="without a number"):
        rank.arrive(0)
    calls[1].cancel()
    # A call that was cancelled is carried out.
    await asyncio.gather(calls[0], rank.arrive(5))
    assert rank.turns == [4, 5, 6, 7] and not rank.failed[3:] and rank.gaps == [0]


async def test_a_place_is_kept_for_what_is_prepared(rank: Rank) -> None:
    rank.messages.take(5)
    # Nothing is missing: not even what may skip goes first.
    calls = [rank.arrive(6), rank.arrive(7, may_skip=True)]
    await asyncio.gather(rank.prepare(5), *calls)
    assert rank.turns == [4, 5, 6, 7]


async def test_a_message_that_may_skip_does_not_wait_for_missing_ones(rank: Rank) -> None:
    waited = rank.arrive(6)
    await rank.arrive(9, may_skip=True)
    # What waited has its turn before it, and knows what it lacks.
    with pytest.raises(OwnError, match="message 6 came, but message 5 before it did not come"):
        await waited
    await rank.arrive(10)
    assert rank.turns == [4, 9, 10]
    assert rank.failed == [1, 2, 3, 5, 6, 7, 8] and rank.gaps == [0, 1, 1]


async def test_a_late_message_has_its_turn_without_missing_ones(rank: Rank) -> None:
    late = Rank(rank.messages.device_thread, deadline_s=0.01)
    calls = [late.arrive(4), late.arrive(3)]
    with pytest.raises(OwnError, match="message 3 came, but message 1 before it"):
        await calls[1]
    await calls[0]
    assert late.turns == [4]
