"""Which waiting entries join a step."""

import pytest
from text_generation_router.scheduler.entry import EntryState

from router.tests.planning import Desk, ids


@pytest.mark.parametrize(
    ("lengths", "limits", "admitted"),
    [
        ([], {}, []),
        ([3, 3, 3], {}, [0, 1, 2]),
        # Rows.
        ([3, 3, 3], {"max_batch_size": 2}, [0, 1]),
        # Prompts stay whole where they fit; a long one is computed alone, in parts.
        ([3, 3, 3], {"max_batch_prefill_tokens": 6}, [0, 1]),
        ([3, 3, 3], {"max_batch_prefill_tokens": 5}, [0]),
        ([9, 1], {"max_batch_prefill_tokens": 4}, [0]),
        ([1, 9, 1], {"max_batch_prefill_tokens": 4}, [0]),
        # An entry that does not fit holds back the ones behind it.
        ([1, 9, 1], {"max_batch_prefill_tokens": 9}, [0]),
        # Blocks of 4: the next token needs room too.
        ([3], {"num_blocks": 1}, [0]),
        ([3, 4], {"num_blocks": 3}, [0]),
        ([4], {"num_blocks": 2}, [0]),
        # One block stays free for each other running entry.
        ([3, 3], {"num_blocks": 3}, [0, 1]),
        ([3, 3], {"num_blocks": 2}, [0]),
        ([3, 3, 3], {"num_blocks": 5}, [0, 1, 2]),
        ([3, 3, 3], {"num_blocks": 4}, [0, 1]),
    ],
)
def test_the_longest_head_of_the_queue_that_fits_is_admitted(
    lengths: list[int], limits: dict[str, int], admitted: list[int]
) -> None:
    desk = Desk(chunks_prompts=False, **limits)
    for number, length in enumerate(lengths):
        desk.submit([number, *range(100, 99 + length)])
    plan = desk.plan()
    assert ids(plan) == admitted
    # Admitted entries have a slot for the next token; the others are as before.
    for entry in plan.admitted if plan else ():
        assert entry.state is EntryState.RUNNING
        length = lengths[entry.id]
        assert len(entry.block_table) == length // 4 + 1
    assert [e.id for e in desk.planner.queue] == list(range(len(lengths)))[len(admitted) :]


def test_without_chunks_enough_join_at_once_or_none() -> None:
    """Without chunks a prefill pauses the running rows: two of them, so two must join at once."""
    desk = Desk(chunks_prompts=False, waiting_served_ratio=1.0, max_batch_prefill_tokens=6)
    for number in range(2):
        desk.submit((number, 1, 2))
    assert ids(desk.step()) == [0, 1]
    desk.submit((2, 1, 2))
    assert ids(desk.step()) == []
    desk.submit((3, *range(9)))
    assert ids(desk.step()) == [], "the second does not fit beside the first"
    assert [entry.id for entry in desk.planner.queue] == [2, 3]


def test_after_a_failed_prefill_the_next_step_admits_none() -> None:
    desk = Desk()
    desk.submit((1, 2, 3))
    desk.step()
    failed = desk.submit((4, 5, 6))
    assert ids(desk.plan()) == [1]
    failed.state = EntryState.ENDED
    desk.planner.is_closed = True
    desk.submit((7, 8, 9))
    assert ids(desk.step()) == [] and ids(desk.step()) == [2]


def test_without_running_entries_one_is_always_admitted() -> None:
    desk = Desk()
    desk.planner.is_closed = True
    desk.submit((1, 2, 3))
    assert ids(desk.step()) == [0]
