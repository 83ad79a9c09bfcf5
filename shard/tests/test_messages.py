"""Messages have their turns in the order of their numbers, in any order of arrival."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from text_generation_shard.errors import BatchError
from text_generation_shard.messages import NumberedMessages


class Ranks:
    """Carries out at once, and notes which messages did not come."""

    def __init__(self) -> None:
        self.skipped: list[int] = []

    def carry_out(self, number: int, work: Any, is_ahead: bool) -> Any:
        return work()

    def skip(self, first: int, end: int) -> None:
        self.skipped += range(first, end)


class Line(NumberedMessages):
    """Owns which messages had their turn."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self.done: list[int] = []
        self.ranks: Any = Ranks()
        super().__init__(thread, self.ranks, lambda: None, lambda _: None)

    def arrive(self, number: int, may_skip: bool = False) -> "asyncio.Future[None]":
        """Take a message that needs no preparation."""
        self.take(number, may_skip)
        return self.run(number, lambda: self.done.append(number))


@pytest.fixture
def line() -> Iterator[Line]:
    with ThreadPoolExecutor(1) as thread:
        yield Line(thread)


async def test_a_message_waits_for_those_before_it(line: Line) -> None:
    line.take(1)
    late = [line.arrive(3), line.arrive(2)]
    assert not line.done
    await line.run(1, lambda: None)
    await asyncio.gather(*late)
    assert line.done == [2, 3] and not line.ranks.skipped


async def test_a_message_that_may_skip_is_carried_out_without_those_that_are_missing(
    line: Line,
) -> None:
    await line.arrive(41, may_skip=True)
    waits = line.arrive(43)
    await line.arrive(45, may_skip=True)
    with pytest.raises(BatchError, match="message 43 came, but not message 42 before it"):
        await waits
    assert line.done == [41, 45] and line.ranks.skipped == [*range(1, 41), 42, 44]
    for number in (42, 45):
        with pytest.raises(BatchError, match=f"message {number} came again or too late"):
            line.take(number)
    await line.arrive(46)
