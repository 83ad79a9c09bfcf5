"""Draft tokens, steps launched ahead and preemption."""

from typing import Any

import pytest
from text_generation_router.scheduler.entry import EntryState

from router.tests.planning import Desk


# Two rows fill a block each, and may both grow by another.
@pytest.mark.parametrize(("num_blocks", "drafted"), [(100, 4), (4, 4), (3, 0)])
def test_fewer_draft_tokens_where_blocks_are_short(num_blocks: int, drafted: int) -> None:
    desk = Desk(num_blocks=num_blocks, speculate=4)
    for number in range(2):
        desk.submit((number, 2, 3), 5)
    desk.step()
    plan = desk.step()
    assert plan.asked == {0, 1} and desk.planner.num_preempted == 0
    assert plan.speculate == drafted
    assert len(plan.grown_blocks) == (2 if drafted else 0)


# As above: rows of 4 tokens may have 9 at the end of the step, and 13 after the next one.
@pytest.mark.parametrize(
    ("num_blocks", "drafted", "num_grown"), [(100, 4, 4), (8, 4, 4), (6, 2, 2), (4, None, 0)]
)
def test_a_step_ahead_has_blocks_for_all_tokens_the_step_before_may_give(
    num_blocks: int, drafted: int | None, num_grown: int
) -> None:
    desk = Desk(num_blocks=num_blocks, speculate=4, runs_ahead=True)
    for number in range(2):
        desk.submit((number, 2, 3), 30)
    desk.step()
    ahead = desk.planner.plan_ahead(desk.plan())
    if drafted is None:
        assert ahead is None
    else:
        assert ahead.is_ahead and ahead.speculate == drafted
        assert len(ahead.grown_blocks) == num_grown


# Two rows with room for 12 tokens each; a third entry waits: for a row, for blocks, or for nothing.
@pytest.mark.parametrize(
    ("limits", "is_ahead"),
    [({"max_batch_size": 2}, True), ({"num_blocks": 7}, True), ({}, False)],
    ids=["rows", "blocks", "nothing"],
)
def test_a_step_is_launched_ahead_where_no_waiting_entry_could_join(
    limits: dict[str, Any], is_ahead: bool
) -> None:
    desk = Desk(runs_ahead=True, **limits)
    for number in range(2):
        desk.submit((number, 2, 3), 9)
    plan = desk.step()
    assert plan.admitted and desk.planner.plan_ahead(plan) is None, "a newcomer needs a prefill"
    waiting = desk.submit(range(20, 32), 20)
    plan = desk.plan()
    if not is_ahead:
        assert plan.admitted == [waiting] and desk.planner.plan_ahead(plan) is None
        return
    assert not plan.admitted and desk.planner.plan_ahead(plan) is not None
    # Each gets 8 more tokens; one step before the last it is known that both end.
    for _ in range(7):
        desk.settle(plan)
        plan = desk.plan()
        assert not plan.admitted
    assert desk.planner.plan_ahead(plan) is None
    desk.settle(plan, ending=[0, 1])
    assert desk.plan().admitted == [waiting]


def test_a_step_launched_ahead_delays_a_waiting_entry_by_one_step() -> None:
    """A row ends unforeseen in the step in flight."""
    desk = Desk(runs_ahead=True, max_batch_size=2)
    for number in range(2):
        desk.submit((number, 2, 3), 30)
    desk.step()
    waiting = desk.submit((7, 8, 9))
    plan = desk.plan()
    ahead = desk.planner.plan_ahead(plan)
    assert ahead is not None
    desk.settle(plan, ending=[1])
    ahead = ahead.without({1})
    assert desk.planner.plan_ahead(ahead) is None
    desk.settle(ahead)
    assert desk.plan().admitted == [waiting]


def test_no_draft_tokens_behind_the_end_of_a_text() -> None:
    """A block table never exceeds the longest context."""
    desk = Desk(speculate=50)
    entry = desk.submit((1, 2, 3), 9)
    desk.step()
    desk.step(num_tokens=3)
    assert len(entry.block_table) == 3 and entry.num_computed == 6


def test_the_newest_is_preempted_and_finds_its_blocks_again() -> None:
    desk = Desk(num_blocks=6, max_batch_total_tokens=24)
    desk.submit(range(7), 17)
    newest = desk.submit(range(20, 27), 17)
    while desk.planner.num_preempted == 0:
        plan = desk.step()
    assert newest.state is EntryState.QUEUED and newest.block_table is None
    assert sorted(plan.asked) == [0] and list(desk.planner.running) == [0]
    num_tokens = newest.num_tokens
    desk.planner.running[0].state = EntryState.ENDED
    assert desk.step().chunks == {1: num_tokens - newest.num_cached_tokens}
    assert newest.num_cached_tokens >= 4
