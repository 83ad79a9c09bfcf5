"""How many prompt tokens a step computes beside decoding rows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.scheduler.costs import ChunkedPrefill, StepCosts

# A step of 8 rows takes 20 ms, a prompt token 0.1 ms.
COSTS = StepCosts(decode_step_ns=20_000_000, num_rows=8, prefill_token_ns=100_000)


@pytest.mark.parametrize(
    ("num_decoding", "costs", "target_ns", "budget"),
    [
        # No request waits.
        (0, COSTS, None, 1000),
        # Twice 20 ms: 20 ms for prompts, 200 tokens, 12 blocks of 16.
        (8, COSTS, None, 192),
        (5, COSTS, None, 192),
        (1, COSTS, None, 192),
        (100, COSTS, None, 192),
        # A target of one's own; at least a block, at most what fits.
        (8, COSTS, 25e6, 48),
        (8, COSTS, 21e6, 16),
        (8, COSTS, 1e6, 16),
        (8, COSTS, 1e12, 1000),
        # Nothing was measured.
        (8, StepCosts(), None, 1000),
        (8, StepCosts(10, 8, 0), None, 1000),
        (8, StepCosts(0, 8, 10), None, 1000),
    ],
)
def test_budget(num_decoding: int, costs: StepCosts, target_ns: float | None, budget: int) -> None:
    assert ChunkedPrefill(1000, 16, costs, target_ns).budget(num_decoding).room(0) == budget


@pytest.mark.parametrize(
    ("num_waiting", "target_ns", "budget"),
    [
        # One long prompt and eight decoding rows: 22.5 ms.
        (1, None, 224),
        (8, None, 400),
        (24, None, 800),
        # 160 ms at most.
        (1000, None, 1600),
        # A target is kept.
        (1000, 25e6, 48),
    ],
)
def test_more_waiting_requests_per_decoding_row_mean_a_larger_budget(
    num_waiting: int, target_ns: float | None, budget: int
) -> None:
    assert ChunkedPrefill(5000, 16, COSTS, target_ns).budget(8, num_waiting).room(0) == budget


# After 1024 tokens, a prompt token takes twice as long.
LONG = replace(COSTS, prefill_context_ns=100_000)


@pytest.mark.parametrize(
    ("start", "target_ns", "budget"),
    [
        (0, None, 192),
        (1024, None, 96),
        # A fourth more.
        (256, None, 153),
        (3 * 1024, None, 48),
        (1_000_000, None, 16),
        (1024, 40e6, 96),
        (1024, 1e12, 1000),
    ],
)
def test_chunk_is_shorter_behind_more_context(
    start: int, target_ns: float | None, budget: int
) -> None:
    left = ChunkedPrefill(1000, 16, LONG, target_ns).budget(8)
    assert left.room(start, is_first=True) == budget


def test_context_cost_is_not_counted_as_overrun() -> None:
    chunked = ChunkedPrefill(1000, 16, LONG)
    for _ in range(40):
        chunked.note(20_000_000 + 96 * 200_000, 8, 96, 96 * 1024)
    assert (chunked.budget(8).room(0), chunked.budget(8).room(1024)) == (192, 96)


def test_step_cost_is_measured_by_number_of_rows() -> None:
    chunked = ChunkedPrefill(1000, 16, COSTS)
    for _ in range(20):
        chunked.note(4_000_000, 1, 0)
    # Alone 4 ms, so 4 ms are left: 40 tokens.
    assert chunked.budget(1).room(0) == 32
    # Of eight there is nothing new.
    assert chunked.budget(8).room(0) == 192


def test_fixed_cost_of_chunks_shrinks_the_budget() -> None:
    """5 ms of the 20 are gone with every step that carries a prompt, however short."""
    chunked = ChunkedPrefill(1000, 16, COSTS)
    for num_prompt_tokens in [192, 150, 16, 64] * 10:
        chunked.note(25_000_000 + num_prompt_tokens * 100_000, 8, num_prompt_tokens)
    assert 100 <= chunked.budget(8).room(0) <= 144


def test_cheaper_tokens_enlarge_the_budget() -> None:
    chunked = ChunkedPrefill(1000, 16, COSTS)
    for _ in range(40):
        chunked.note(20_000_000 + 192 * 50_000, 8, 192)
    assert chunked.budget(8).room(0) == 384


def test_budget_is_never_below_half_of_the_target() -> None:
    """Otherwise a prompt would take for ever, and no row would get a token sooner."""
    chunked = ChunkedPrefill(1000, 16, COSTS)
    for _ in range(1000):
        chunked.note(10_000_000_000, 8, 16)
    assert chunked.budget(8).room(0) == 96


def test_one_slow_step_changes_little() -> None:
    chunked = ChunkedPrefill(1000, 16, COSTS)
    chunked.note(10_000_000_000, 8, 0)
    assert chunked.budget(8).room(0) == 240
    chunked = ChunkedPrefill(1000, 16, COSTS)
    chunked.note(10_000_000_000, 8, 192)
    assert chunked.budget(8).room(0) == 160
    for _ in range(10):
        chunked.note(20_000_000 + 160 * 100_000, 8, 160)
    assert chunked.budget(8).room(0) == 192


@given(st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 300), st.integers(0, 5000))))
def test_there_is_always_a_block_and_never_too_much(steps: list[tuple[int, int, int]]) -> None:
    chunked = ChunkedPrefill(500, 16, COSTS)
    for step in steps:
        chunked.note(*step)
        for num_decoding in (0, 1, 7, 300):
            budget = chunked.budget(num_decoding, num_decoding % 50).room(0)
            assert 16 <= budget <= 500 and (budget % 16 == 0 or budget == 500)
