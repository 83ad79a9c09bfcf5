"""For models with a state per row: which snapshots entries begin from, and which they store."""

from typing import Any

import pytest
from text_generation_router.scheduler.entry import Entry, EntryState

from router.tests.planning import TWO_BLOCKS, Desk

# Of 4 tokens each.
FIRST, SECOND, THIRD = range(4), range(10, 14), range(20, 24)


def desk_of(num_snapshots: int = 10, **limits: Any) -> Desk:
    return Desk(num_snapshots=num_snapshots, **limits)


def run(desk: Desk, *parts: Any, **options: Any) -> Entry:
    """Computes a prompt and ends its entry; `stores` is what it was at first."""
    entry, stores = desk.submit([token for part in parts for token in part], **options), {}
    while True:
        plan = desk.plan()
        stores = stores or dict(entry.stores)
        is_last = entry.id in plan.asked
        desk.settle(plan, ending=[entry.id] if is_last else [])
        if is_last:
            entry.stores = stores
            return entry


def num_owned(desk: Desk) -> int:
    """Snapshots that are free or of a block, and not promised."""
    snapshots = desk.planner.blocks.allocator.snapshots
    assert not snapshots._nodes.keys() & set(snapshots._free)
    return len(snapshots._free) + len(snapshots._nodes)


def begun(entry: Entry) -> tuple[int, list[int]]:
    """How many tokens an entry has not computed, and where it stored its state."""
    return entry.num_cached_tokens, list(entry.stores)


def test_a_prompt_is_stored_behind_its_last_whole_block() -> None:
    desk = desk_of()
    assert begun(run(desk, FIRST, SECOND, [1])) == (0, [8])
    assert begun(run(desk, FIRST, SECOND, [1])) == (8, [])
    assert begun(run(desk, FIRST, SECOND, THIRD, [1])) == (8, [12])
    # Its last token is always computed, and with it its block.
    assert begun(run(desk, FIRST, SECOND, THIRD)) == (8, [])
    assert begun(run(desk, [1, 2])) == (0, [])


def test_the_first_that_branches_off_stores_what_is_common() -> None:
    """Blocks without a snapshot are computed again, once."""
    desk = desk_of()
    run(desk, FIRST, SECOND, [1])
    assert begun(run(desk, FIRST, THIRD, [1])) == (0, [4, 8])
    assert begun(run(desk, FIRST, range(30, 34), [1])) == (4, [8])
    # What was generated is common, too.
    long = desk.submit([*FIRST, *SECOND, 1], 20)
    for _ in range(8):
        desk.step()
    answer = [*FIRST, *SECOND, 1, *[7] * 7]
    assert long.num_computed == 16
    assert begun(run(desk, answer, [5, 5])) == (8, [16])


def test_an_entry_begins_from_the_deepest_snapshot() -> None:
    desk = desk_of()
    for text in ([FIRST, [1]], [FIRST, SECOND, [1]], [FIRST, SECOND, THIRD, [1]]):
        run(desk, *text)
    snapshots = []
    for text in ([FIRST, THIRD], [FIRST, SECOND, FIRST], [FIRST, SECOND, THIRD, FIRST]):
        entry = desk.submit([token for part in text for token in part])
        desk.step()
        snapshots.append(entry.snapshot)
        assert entry.num_cached_tokens == 4 * len(text) - 4
    assert len(set(snapshots)) == 3 and None not in snapshots


def test_no_entry_shares_what_the_same_step_computes() -> None:
    desk = desk_of()
    for end in range(2):
        desk.submit([*FIRST, *SECOND, 50 + end])
    assert desk.step().chunks == {0: 9, 1: 9}
    late = desk.submit([*FIRST, *SECOND, 60])
    assert desk.step().chunks == {2: 1}
    assert late.num_cached_tokens == 8


@pytest.mark.parametrize("shares_prefixes", [True, False])
def test_sequences_of_one_prompt_wait_for_the_first(shares_prefixes: bool) -> None:
    """No longer than it takes to compute it, or until that is preempted or leaves."""
    desk = desk_of(max_batch_prefill_tokens=8, shares_prefixes=shares_prefixes)
    prompt = [*FIRST, *SECOND, 1]
    entries = [desk.submit(prompt, group=0) for _ in range(3)]
    other = desk.submit(THIRD)
    assert [desk.step().chunks for _ in range(2)] == [{0: 8}, {0: 1, 1: 1, 2: 1, other.id: 4}]
    tables = [entry.block_table for entry in entries]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    left, last = (desk.submit(range(30, 50), group=5) for _ in range(2))
    assert desk.step().chunks == {left.id: 8}
    left.state = EntryState.ENDED
    assert last.id in desk.step().chunks
    desk = desk_of()
    short = [desk.submit([1, 2], group=8) for _ in range(2)]
    assert desk.step().chunks == {each.id: 2 for each in short}, "there is no state to wait for"


def test_a_snapshot_is_known_once_its_part_is_computed() -> None:
    desk = desk_of(**TWO_BLOCKS)
    desk.submit((1, 2, 3))
    desk.step()
    first = desk.submit(range(21))
    assert desk.step().chunks == {1: 8} and list(first.stores) == [20]
    assert begun(run(desk, range(9))) == (0, [8])
    assert first.num_computed > 8


def test_the_least_recently_used_snapshot_is_reused() -> None:
    desk = desk_of(num_snapshots=2)
    run(desk, FIRST, [1])
    run(desk, SECOND, [1])
    assert begun(run(desk, FIRST, [1])) == (4, [])
    run(desk, THIRD, [1])
    assert begun(run(desk, FIRST, [1])) == (4, [])
    # Its block is cached, its snapshot is not: it stores it again.
    assert begun(run(desk, SECOND, [1])) == (0, [4])
    assert begun(run(desk, THIRD, [1])) == (0, [4])


def test_without_room_nothing_is_stored_or_shared() -> None:
    desk = desk_of(num_snapshots=1)
    desk.submit([*FIRST, 1])
    desk.submit([*SECOND, 1])
    plan = desk.plan()
    assert [list(entry.stores) for entry in plan.admitted] == [[4], []]
    desk.settle(plan)
    for num_snapshots in (0, 1):
        desk = desk_of(num_snapshots=num_snapshots, shares_prefixes=num_snapshots == 0)
        for _ in range(2):
            assert begun(run(desk, FIRST, SECOND, [1])) == (0, [])


def test_a_snapshot_goes_with_its_block() -> None:
    desk = desk_of(num_blocks=6)
    run(desk, FIRST, [1])
    free = desk.planner.blocks.allocator.snapshots._free
    assert len(free) == 9
    run(desk, range(50, 71), max_new_tokens=2)
    assert len(free) == 9
    assert begun(run(desk, FIRST, [1])) == (0, [4])
    assert num_owned(desk) == 10


def test_a_preempted_entry_goes_on_from_its_best_snapshot() -> None:
    """And stores its state behind all that is known of it."""
    desk = desk_of(num_blocks=8)
    old = desk.submit(range(30, 41), 17)
    young = desk.submit([*FIRST, *SECOND, 1], 12)
    while young.block_table is not None or not young.token_ids:
        desk.step()
    assert young.snapshot is None and not young.stores and num_owned(desk) == 10
    desk.settle(desk.plan(), ending=[old.id])
    plan = desk.plan()
    assert plan.admitted == [young]
    assert begun(young) == (8, [12])


def test_a_state_behind_a_forgotten_block_is_not_kept() -> None:
    """The second writer of a text goes on behind the first's blocks, which nothing else holds."""
    desk = desk_of(max_batch_prefill_tokens=10)
    first, second = desk.submit([*FIRST, 1]), desk.submit([*FIRST, *range(20, 36)])
    desk.settle(desk.plan(), ending=[first.id])
    assert second.num_computed == 4
    allocator = desk.planner.blocks.allocator
    allocator.release([allocator._take() for _ in range(allocator.num_free)])
    while second.num_computed < 16:
        desk.step()
    assert second.stores == {} and num_owned(desk) == 10
    assert not desk.planner.blocks.allocator.snapshots._nodes


def test_what_is_promised_is_free_again_when_an_entry_leaves() -> None:
    desk = desk_of(**TWO_BLOCKS)
    desk.submit((1, 2, 3))
    desk.step()
    entry = desk.submit(range(21))
    desk.step()
    assert num_owned(desk) == 9
    entry.state = EntryState.ENDED
    desk.planner.sweep()
    assert num_owned(desk) == 10


def test_after_a_loss_nothing_is_known() -> None:
    desk = desk_of()
    run(desk, FIRST, [1])
    entry = desk.submit([*FIRST, *SECOND, 1])
    desk.step()
    assert entry.snapshot is not None
    desk.planner.lose_blocks()
    plan = desk.plan()
    assert plan.admitted == [entry] and [*plan.entries.values()] == [entry]
    assert (entry.snapshot, begun(entry)) == (None, (0, [8]))
    assert num_owned(desk) == 9


def test_other_models_store_nothing() -> None:
    desk = Desk()
    assert begun(run(desk, FIRST, SECOND, [1])) == (0, [])
    assert begun(run(desk, FIRST, THIRD, [1])) == (4, [])
    assert desk.planner.blocks.allocator.snapshots.promise() is None
