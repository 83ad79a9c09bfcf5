"""How many tokens of which prompts a step computes."""

from dataclasses import replace

import pytest

from router.tests.planning import COSTS, TWO_BLOCKS, Desk, ids


def test_a_prompt_is_computed_in_parts_while_rows_decode() -> None:
    desk = Desk(**TWO_BLOCKS)
    desk.submit((1, 2, 3))
    assert desk.step().chunks == {0: 3}
    desk.submit(range(21))
    parts = [desk.step() for _ in range(4)]
    assert [plan.chunks for plan in parts] == [{1: 8}, {1: 8}, {1: 5}, {}]
    assert [sorted(plan.asked) for plan in parts] == [[0], [0], [0, 1], [0, 1]]
    assert [ids(plan) for plan in parts] == [[1], [], [], []]


def test_the_oldest_prompt_comes_first_and_the_rest_of_the_budget_is_for_the_next() -> None:
    desk = Desk(**TWO_BLOCKS)
    desk.submit((1, 2, 3))
    desk.step()
    desk.submit(range(10, 20))
    desk.submit(range(30, 45))
    steps = [desk.step() for _ in range(4)]
    # The second step has 6 of 8 tokens left: one whole block.
    assert [plan.chunks for plan in steps] == [{1: 8}, {1: 2, 2: 4}, {2: 8}, {2: 3}]


def test_more_waiting_prompts_mean_a_larger_budget() -> None:
    desk = Desk(costs=COSTS, max_batch_size=4)
    desk.submit((1, 2, 3))
    desk.step()
    # Three prompts could join beside one decoding row: 8 * (1 + 3) tokens. Then two beside two.
    for start in range(4):
        desk.submit(range(start, start + 20))
    assert [desk.step().chunks for _ in range(2)] == [{1: 20, 2: 12}, {2: 8, 3: 8}]


def test_tokens_behind_a_cached_prefix_cost_more_too() -> None:
    desk = Desk(
        costs=replace(COSTS, prefill_context_ns=COSTS.prefill_token_ns),
        **{"num_blocks": 1000, "max_batch_total_tokens": 4000, "max_batch_prefill_tokens": 3000},
        target_ns=COSTS.decode_step_ns + 256 * COSTS.prefill_token_ns,
    )
    desk.submit(range(1024))
    plan = desk.plan()
    assert plan is not None
    desk.settle(plan, ending=[0])
    desk.submit((1, 2, 3), max_new_tokens=100)
    desk.step()
    # 256 tokens without preceding tokens, or half as many behind 1024; an entry that joins beside
    # them gets the rest of the time.
    cached = desk.submit([*range(1024), *range(5000, 5200)])
    plan = desk.plan()
    assert plan is not None
    assert plan.chunks == {2: 128} and cached.num_cached_tokens == 1024
    desk.settle(plan, forward_ns=200 + 128 * 50)
    desk.submit(range(3000, 3200))
    # 72 * (1 + 1152 / 1024) is 153: that leaves 103.
    assert desk.step().chunks == {2: 72, 3: 100}


@pytest.mark.parametrize("chunks_prompts", [True, False])
def test_a_budget_below_one_block_still_makes_progress(chunks_prompts: bool) -> None:
    desk = Desk(max_batch_prefill_tokens=3, chunks_prompts=chunks_prompts)
    desk.submit(range(7))
    desk.submit(range(7))
    steps = [desk.step().chunks for _ in range(5)]
    # A part ends at the end of a block; the second prompt finds one block cached.
    assert steps == [{0: 3}, {0: 1}, {0: 3}, {1: 3}, {}]
