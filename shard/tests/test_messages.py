"""Messages have their turns in the order of their numbers, in any order of arrival."""

import pytest
from text_generation_shard.errors import BatchError
from text_generation_shard.messages import MessageOrder, Turn


def arrive(order: MessageOrder, number: int, may_skip: bool = False) -> list[Turn]:
    """Take a message that needs no preparation; the turns after it."""
    order.take(number, may_skip)
    order.set_ready(number)
    return turns(order)


def turns(order: MessageOrder) -> list[Turn]:
    found = []
    while (turn := order.due()) is not None:
        found.append(turn)
    return found


def after(last: int) -> MessageOrder:
    """An order after this turn."""
    order = MessageOrder()
    assert arrive(order, last, may_skip=True)[-1].number == last
    return order


def test_what_comes_too_early_waits() -> None:
    order = after(4)
    assert arrive(order, 7) == [] and arrive(order, 6) == []
    assert order.missing(6) == order.missing(7) == 5
    assert [turn.number for turn in arrive(order, 5)] == [5, 6, 7]
    assert order.last == 7 and order.missing(7) == 0


def test_a_place_is_kept_for_what_is_prepared() -> None:
    order = after(4)
    order.take(5, may_skip=False)
    assert arrive(order, 6) == [] and order.missing(6) == 0
    # Nothing is missing: not even what may skip goes first.
    assert arrive(order, 7, may_skip=True) == []
    order.set_ready(5)
    assert turns(order) == [Turn(5), Turn(6), Turn(7, 0, True)]


@pytest.mark.parametrize("number", [3, 4, 6])
def test_a_number_has_one_turn(number: int) -> None:
    order = after(4)
    order.take(6, may_skip=False)
    with pytest.raises(BatchError, match=f"message {number} came again or too late: message 6"):
        order.take(number, may_skip=True)
    assert [turn.number for turn in arrive(order, 5)] == [5]


def test_what_may_skip_does_not_wait_for_what_is_missing() -> None:
    order = MessageOrder()
    assert arrive(order, 41, may_skip=True) == [Turn(41, 1, True)]
    assert arrive(order, 43) == []
    # What waited has its turn before it, and knows what it lacks.
    assert arrive(order, 45, may_skip=True) == [Turn(43, 42), Turn(45, 44, True)]
    with pytest.raises(BatchError, match="too late"):
        order.take(42, may_skip=False)
    assert arrive(order, 46) == [Turn(46)]


def test_what_is_late_has_its_turn_without_what_is_missing() -> None:
    order = after(4)
    assert arrive(order, 7) == [] and arrive(order, 6) == []
    order.set_late(6)
    assert turns(order) == [Turn(6, 5), Turn(7)]
    assert order.last == 7
