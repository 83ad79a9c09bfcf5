"""Which blocks entries share, and which tokens they therefore do not compute."""

from typing import Any

import pytest
from text_generation_router.request import Pooling
from text_generation_router.scheduler.entry import EntryState

from router.tests.planning import TWO_BLOCKS, Desk
from router.tests.scheduling import check_integrity


def test_blocks_are_shared_in_the_step_that_writes_them() -> None:
    desk = Desk()
    for end in range(3):
        desk.submit([*range(8), 50 + end])
    plan = desk.plan()
    assert plan.chunks == {0: 9, 1: 1, 2: 1}
    tables = [entry.block_table for entry in plan.admitted]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert desk.planner.blocks.allocator.num_used == 2 + 3


def test_a_joining_entry_shares_blocks_of_a_running_prompt() -> None:
    """Entry 1 computes its last part in the step that entry 2 joins."""
    desk = Desk(**TWO_BLOCKS)
    desk.submit((1, 2, 3))
    desk.step()
    desk.submit(range(13))
    desk.submit(range(14))
    assert desk.step().chunks == {1: 8}
    assert desk.plan().chunks == {1: 5, 2: 2}
    ours, theirs = (desk.planner.running[i].block_table for i in (1, 2))
    assert ours[:3] == theirs[:3] and ours[3] != theirs[3]


def test_a_repeated_prompt_is_not_computed_again() -> None:
    desk = Desk()
    desk.submit(range(12), 1)
    plan = desk.plan()
    desk.settle(plan, ending=[0])
    again = desk.submit(range(12))
    # The last token is always computed, and with it its block.
    assert desk.step().chunks == {1: 4} and again.num_cached_tokens == 8
    longer = desk.submit([*range(12), 7, 7, 7])
    assert desk.step().chunks == {2: 3} and longer.num_cached_tokens == 12


def test_a_mean_needs_every_token_but_the_last_hidden_state_does_not() -> None:
    desk = Desk()
    desk.submit(range(9))
    desk.step()
    mean = desk.submit(range(9), pooling=Pooling.MEAN)
    last = desk.submit(range(9), pooling=Pooling.LAST)
    scored = desk.submit(range(9), score_token_ids=(1, 2))
    assert desk.step().chunks == {mean.id: 9, last.id: 1, scored.id: 1}


def test_prompt_logprobs_need_every_token_and_publish_them() -> None:
    desk = Desk()
    desk.submit(range(9))
    desk.step()
    told = desk.submit(range(9), prefill_logprobs=True)
    assert desk.step().chunks == {1: 9} and told.num_cached_tokens == 0
    desk.submit([*range(9, 18)], prefill_logprobs=True)
    desk.submit([*range(9, 18)])
    assert desk.step().chunks == {2: 9, 3: 1}


@pytest.mark.parametrize(
    ("first", "second", "limits", "is_shared"),
    [
        ((range(9), 3), (range(9), 3), {"recompute_at": 12}, True),
        # It may grow beyond the limit, and then its blocks are rewritten.
        ((range(9), 4), (range(9), 3), {"recompute_at": 12}, False),
        ((range(9), 3), (range(9), 4), {"recompute_at": 12}, False),
        # The KV of a long text differs from the first token on.
        ((range(9), 3), (range(13), 3), {"recompute_at": 12}, False),
        ((range(14), 3), (range(13), 3), {"recompute_at": 12}, True),
        # The KV of longer prompts depends on their length.
        ((range(9), 30), (range(12), 3), {"prompt_scaled_at": 12}, True),
        ((range(9), 3), (range(13), 3), {"prompt_scaled_at": 12}, False),
        ((range(14), 3), (range(13), 3), {"prompt_scaled_at": 12}, False),
        ((range(13), 3), ([*range(12), 99], 3), {"prompt_scaled_at": 12}, True),
        ((range(9), 3), (range(9), 3), {"shares_prefixes": False}, False),
    ],
)
def test_only_blocks_with_equal_kv_are_shared(
    first: Any, second: Any, limits: dict[str, Any], is_shared: bool
) -> None:
    desk = Desk(**limits)
    desk.submit(*first)
    desk.step()
    other = desk.submit(*second)
    desk.step()
    assert (other.num_cached_tokens > 0) is is_shared


@pytest.mark.parametrize("shares_prefixes", [True, False])
def test_cache_salts_share_nothing_in_a_step_or_later(shares_prefixes: bool) -> None:
    desk = Desk(shares_prefixes=shares_prefixes)
    desk.submit(range(9), cache_salt="a")
    for salt in ("b", "", "ab"):
        desk.submit(range(9), cache_salt=salt)
    assert desk.step().chunks == {0: 9, 1: 9, 2: 9, 3: 9}, "not even pending blocks"
    again = [desk.submit(range(9), cache_salt=salt) for salt in ("b", "", "c", "a", "c")]
    if shares_prefixes:
        assert desk.step().chunks == {4: 1, 5: 1, 6: 9, 7: 1, 8: 1}
    else:
        assert desk.step().chunks == dict.fromkeys(range(4, 9), 9)
    tables = [entry.block_table for entry in again]
    held = [set(table) for table in tables if table is not None]
    assert not held[0] & held[1] and not held[0] & held[3]
    check_integrity(desk.planner)


@pytest.mark.parametrize("shares_prefixes", [True, False])
def test_sequences_of_one_prompt_share_with_any_cache_salt(shares_prefixes: bool) -> None:
    desk = Desk(shares_prefixes=shares_prefixes)
    for salt, group in (("a", 0), ("a", 0), ("b", 2), ("b", 2)):
        desk.submit(range(9), group=group, cache_salt=salt)
    assert desk.step().chunks == {0: 9, 1: 1, 2: 9, 3: 1}


def test_without_the_cache_only_the_sequences_of_one_prompt_share() -> None:
    desk = Desk(shares_prefixes=False)
    entries = [desk.submit(range(9), group=group) for group in (0, 0, None, 3)]
    assert desk.step().chunks == {0: 9, 1: 1, 2: 9, 3: 9}
    for entry in entries[:2]:
        entry.state = EntryState.ENDED
    late = desk.submit(range(9), group=0)
    assert desk.step().chunks == {4: 9} and late.num_cached_tokens == 0
