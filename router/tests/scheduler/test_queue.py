from collections.abc import Sequence

import pytest
from text_generation_router.scheduler.answer import Answer
from text_generation_router.scheduler.entry import Entry, EntryState
from text_generation_router.scheduler.queue import Queue

from router.tests.scheduling import make_request, make_tokenizer

TOKENIZER = make_tokenizer()


def queue_of(num: int, priorities: Sequence[int] = ()) -> Queue:
    """Entries 0, 1, …"""
    queue = Queue()
    for entry_id in range(num):
        request = make_request(priority=priorities[entry_id] if priorities else 0)
        queue.append(Entry(entry_id, request, Answer(request, TOKENIZER)))
    return queue


def test_first_come_first_out() -> None:
    queue = queue_of(2)
    assert queue.first().id == 0 and queue.pop().id == 0
    assert queue.pop().id == 1 and queue.first() is None and len(queue) == 0


def test_the_preempted_come_back_first_and_in_order() -> None:
    queue = queue_of(4)
    running = [queue.pop() for _ in range(3)]
    for entry in reversed(running[1:]):
        entry.state = EntryState.RUNNING
        queue.put_back(entry)
    queue.integrity()
    assert [entry.id for entry in queue] == [1, 2, 3]


def test_higher_priorities_go_first_and_equals_by_age() -> None:
    queue = queue_of(6, (0, 3, 0, -2, 3, -2))
    queue.integrity()
    assert [entry.id for entry in queue] == [1, 4, 0, 2, 3, 5]
    first, second = queue.pop(), queue.pop()
    queue.put_back(second)
    queue.put_back(first)
    queue.remove(list(queue)[2])
    assert [entry.id for entry in queue] == [1, 4, 2, 3, 5]


def test_remove() -> None:
    queue = queue_of(3)
    queue.remove(list(queue)[1])
    assert [entry.id for entry in queue] == [0, 2] and len(queue) == 2


def test_disorder_is_noticed() -> None:
    queue = queue_of(2)
    queue.first().rank = (0, 5)
    with pytest.raises(AssertionError, match="out of order"):
        queue.integrity()
