"""What is in a step: tables of who is let in, with how much of a prompt, in which blocks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from text_generation_router.request import FinishReason, Pooling
from text_generation_router.scheduler.answer import Answer
from text_generation_router.scheduler.chunked_prefill import StepCosts
from text_generation_router.scheduler.entry import Entry, EntryState
from text_generation_router.scheduler.plan import Plan, SchedulerLimits
from text_generation_router.scheduler.planner import Planner
from text_generation_router.scheduler.shards import StepResult

from router.tests.scheduling import make_request, make_tokenizer

TOKENIZER = make_tokenizer()
# Parts of prompts beside a decoding row: two blocks of 4.
COSTS = StepCosts(decode_step_ns=200, num_rows=1, prefill_token_ns=25)
TWO_BLOCKS = {"costs": COSTS, "target_ns": 400.0}


class Desk:
    """A planner and the steps it makes; nobody computes anything."""

    def __init__(self, **limits: Any) -> None:
        given: dict[str, Any] = {
            "num_blocks": 100,
            "block_size": 4,
            "max_batch_size": 100,
            "max_batch_prefill_tokens": 100,
            "max_batch_total_tokens": 400,
            "waiting_served_ratio": 0.0,
            "max_waiting_tokens": 20,
        }
        self.planner = Planner(SchedulerLimits(**(given | limits)))
        self.num = 0

    def submit(self, prompt: Sequence[int], max_new_tokens: int = 20, **options: Any) -> Entry:
        """Queues an entry; ids are 0, 1, …"""
        group = options.pop("group", None)
        request = make_request(prompt, max_new_tokens, **options)
        entry = Entry(self.num, request, Answer(request, TOKENIZER), group)
        self.planner.queue.append(entry)
        self.num += 1
        return entry

    def plan(self) -> Plan | None:
        """The next step."""
        self.planner.sweep()
        advance = self.planner.advance()
        plan = self.planner.plan(advance if self.planner.running else None)
        self.planner.integrity()
        return plan

    def settle(
        self, plan: Plan, num_tokens: int = 1, ending: Sequence[int] = (), forward_ns: int = 0
    ) -> None:
        """Everybody who was asked gets so many tokens 7."""
        ids = sorted(plan.asked)
        reasons = [FinishReason.EOS_TOKEN if i in ending else None for i in ids]
        tokens = [7] * (num_tokens * len(ids))
        counts = [num_tokens] * len(ids) if num_tokens > 1 else ()
        result = StepResult(ids, tokens, [0.0] * len(tokens), reasons, None, counts)
        self.planner.settle(plan, replace(result, forward_ns=forward_ns))
        self.planner.integrity()

    def step(self, num_tokens: int = 1) -> Plan:
        """A step that is planned and done."""
        plan = self.plan()
        assert plan is not None
        self.settle(plan, num_tokens)
        return plan


def ids(plan: Plan | None) -> list[int]:
    return [] if plan is None else [entry.id for entry in plan.admitted]


@pytest.mark.parametrize(
    ("lengths", "limits", "admitted"),
    [
        ([], {}, []),
        ([3, 3, 3], {}, [0, 1, 2]),
        # Rows.
        ([3, 3, 3], {"max_batch_size": 2}, [0, 1]),
        # Prompts are whole where they fit; a long one goes alone, in parts.
        ([3, 3, 3], {"max_batch_prefill_tokens": 6}, [0, 1]),
        ([3, 3, 3], {"max_batch_prefill_tokens": 5}, [0]),
        ([9, 1], {"max_batch_prefill_tokens": 4}, [0]),
        ([1, 9, 1], {"max_batch_prefill_tokens": 4}, [0]),
        # Nobody overtakes.
        ([1, 9, 1], {"max_batch_prefill_tokens": 9}, [0]),
        # Blocks of 4: the next token needs room too.
        ([3], {"num_blocks": 1}, [0]),
        ([3, 4], {"num_blocks": 3}, [0]),
        ([4], {"num_blocks": 2}, [0]),
        # One block stays free for each entry that runs beside the newest.
        ([3, 3], {"num_blocks": 3}, [0, 1]),
        ([3, 3], {"num_blocks": 2}, [0]),
        ([3, 3, 3], {"num_blocks": 5}, [0, 1, 2]),
        ([3, 3, 3], {"num_blocks": 4}, [0, 1]),
    ],
)
def test_who_is_let_in(lengths: list[int], limits: dict[str, int], admitted: list[int]) -> None:
    desk = Desk(chunks_prompts=False, **limits)
    for number, length in enumerate(lengths):
        desk.submit([number, *range(100, 99 + length)])
    plan = desk.plan()
    assert ids(plan) == admitted
    # Those who were let in have room for the next token, the others left no trace.
    for entry in plan.admitted if plan else ():
        assert entry.state is EntryState.RUNNING
        length = lengths[entry.id]
        assert entry.block_table.num_slots >= length + 1 > entry.block_table.num_slots - 4
    assert [e.id for e in desk.planner.queue] == list(range(len(lengths)))[len(admitted) :]


def test_enough_or_nobody() -> None:
    """Without chunks those who run are held up: two of them, so that two must come at once."""
    desk = Desk(chunks_prompts=False, waiting_served_ratio=1.0, max_batch_prefill_tokens=6)
    for number in range(2):
        desk.submit((number, 1, 2))
    assert ids(desk.step()) == [0, 1]
    desk.submit((2, 1, 2))
    assert ids(desk.step()) == []
    desk.submit((3, *range(9)))
    assert ids(desk.step()) == [], "the second does not fit beside the first"
    assert [entry.id for entry in desk.planner.queue] == [2, 3]


def test_a_prompt_is_computed_in_parts_while_others_decode() -> None:
    desk = Desk(**TWO_BLOCKS)
    desk.submit((1, 2, 3))
    assert desk.step().chunks == {0: 3}
    desk.submit(range(21))
    parts = [desk.step() for _ in range(4)]
    assert [plan.chunks for plan in parts] == [{1: 8}, {1: 8}, {1: 5}, {}]
    assert [sorted(plan.asked) for plan in parts] == [[0], [0], [0, 1], [0, 1]]
    assert [ids(plan) for plan in parts] == [[1], [], [], []]
    assert parts[1].advance.chunks == ((1, 8),)


def test_the_oldest_prompt_comes_first_and_what_is_left_is_for_the_next() -> None:
    desk = Desk(**TWO_BLOCKS)
    desk.submit((1, 2, 3))
    desk.step()
    desk.submit(range(10, 20))
    desk.submit(range(30, 45))
    steps = [desk.step() for _ in range(4)]
    # Of the 8 the second step has 6 left, of which one block is whole.
    assert [plan.chunks for plan in steps] == [{1: 8}, {1: 2, 2: 4}, {2: 8}, {2: 3}]


def test_the_more_wait_the_more_is_computed() -> None:
    desk = Desk(costs=COSTS, max_batch_size=4)
    desk.submit((1, 2, 3))
    desk.step()
    # Three wait for one that decodes, another one could not come in: 8 * (1 + 3) tokens. Then two
    # for two.
    for start in range(4):
        desk.submit(range(start, start + 20))
    assert [desk.step().chunks for _ in range(2)] == [{1: 20, 2: 12}, {2: 8, 3: 8}]


def test_parts_get_shorter_towards_the_end_of_a_long_prompt() -> None:
    """Of 2,048 tokens, the last take three times as long as the first."""
    desk = Desk(
        costs=replace(COSTS, prefill_context_ns=COSTS.prefill_token_ns),
        **{"num_blocks": 1000, "max_batch_total_tokens": 4000, "max_batch_prefill_tokens": 3000},
        target_ns=COSTS.decode_step_ns + 256 * COSTS.prefill_token_ns,
    )
    desk.submit((1, 2, 3), max_new_tokens=100)
    desk.step()
    entry = desk.submit(range(2048))
    parts = []
    while entry.num_computed < 2048:
        plan = desk.plan()
        assert plan is not None
        [part] = plan.chunks.values()
        start = entry.num_computed
        duration_ns = 200 + part * 25 * (1024 + start) // 1024
        desk.settle(plan, forward_ns=duration_ns)
        parts.append(part)
        # The time there is, in blocks of 4, or all that is left.
        assert part == min(256 * 1024 // (1024 + start) // 4 * 4, 2048 - start)
    assert parts[:3] == [256, 204, 176] and parts[-2] < 100


def test_behind_a_cached_prefix_tokens_take_longer_too() -> None:
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
    # 256 tokens with nothing in front of them, or half as many behind 1024; what comes in beside
    # them gets the time that they leave.
    cached = desk.submit([*range(1024), *range(5000, 5200)])
    plan = desk.plan()
    assert plan is not None
    assert plan.chunks == {2: 128} and cached.num_cached_tokens == 1024
    desk.settle(plan, forward_ns=200 + 128 * 50)
    desk.submit(range(3000, 3200))
    # 72 * (1 + 1152 / 1024) is 153: that leaves 103.
    assert desk.step().chunks == {2: 72, 3: 100}


def test_nobody_decodes_so_nobody_waits() -> None:
    desk = Desk(**TWO_BLOCKS, max_batch_prefill_tokens=16)
    desk.submit(range(40))
    assert [desk.step().chunks for _ in range(4)] == [{0: 16}, {0: 16}, {0: 8}, {}]


@pytest.mark.parametrize("chunks_prompts", [True, False])
def test_a_budget_of_less_than_a_block_still_moves_on(chunks_prompts: bool) -> None:
    desk = Desk(max_batch_prefill_tokens=3, chunks_prompts=chunks_prompts)
    desk.submit(range(7))
    desk.submit(range(7))
    steps = [desk.step().chunks for _ in range(5)]
    # Up to the end of a block, then the part that is there; the second finds a block.
    assert steps == [{0: 3}, {0: 1}, {0: 3}, {1: 3}, {}]


def test_what_a_step_writes_is_shared_in_the_same_step() -> None:
    desk = Desk()
    for end in range(3):
        desk.submit([*range(8), 50 + end])
    plan = desk.plan()
    assert plan.chunks == {0: 9, 1: 1, 2: 1}
    tables = [entry.block_table.block_ids for entry in plan.admitted]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert desk.planner.allocator.num_used == 2 + 3


def test_what_a_running_prompt_writes_is_shared_with_who_joins() -> None:
    """Entry 1 computes its last part in the step in which entry 2 comes."""
    desk = Desk(**TWO_BLOCKS)
    desk.submit((1, 2, 3))
    desk.step()
    desk.submit(range(13))
    desk.submit(range(14))
    assert desk.step().chunks == {1: 8}
    assert desk.plan().chunks == {1: 5, 2: 2}
    ours, theirs = (desk.planner.running[i].block_table.block_ids for i in (1, 2))
    assert ours[:3] == theirs[:3] and ours[3] != theirs[3]


def test_a_prompt_that_comes_again_is_not_computed_again() -> None:
    desk = Desk()
    desk.submit(range(12), 1)
    plan = desk.plan()
    desk.settle(plan, ending=[0])
    again = desk.submit(range(12))
    # The last token is computed in any case, and with it its block.
    assert desk.step().chunks == {1: 4} and again.num_cached_tokens == 8
    longer = desk.submit([*range(12), 7, 7, 7])
    assert desk.step().chunks == {2: 3} and longer.num_cached_tokens == 12


def test_generated_text_is_found_too() -> None:
    desk = Desk()
    desk.submit(range(4), 9)
    for _ in range(8):
        plan = desk.step()
    desk.settle(desk.plan(), ending=[0])
    assert plan.asked == {0}
    # 4 tokens of the prompt and 9 of the answer, whose last one was never computed.
    follow_up = desk.submit([*range(4), *[7] * 9, 1, 2, 3])
    assert desk.step().chunks == {1: 4} and follow_up.num_cached_tokens == 12


def test_a_mean_needs_every_token_but_the_last_one_by_itself_does_not() -> None:
    desk = Desk()
    desk.submit(range(9))
    desk.step()
    mean = desk.submit(range(9), pooling=Pooling.MEAN)
    last = desk.submit(range(9), pooling=Pooling.LAST)
    scored = desk.submit(range(9), score_token_ids=(1, 2))
    assert desk.step().chunks == {mean.id: 9, last.id: 1, scored.id: 1}


def test_prompt_logprobs_need_every_token_but_leave_them_to_others() -> None:
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
        # It may grow beyond the limit, and then its blocks are written anew.
        ((range(9), 4), (range(9), 3), {"recompute_at": 12}, False),
        ((range(9), 3), (range(9), 4), {"recompute_at": 12}, False),
        # A long text is computed otherwise from the beginning.
        ((range(9), 3), (range(13), 3), {"recompute_at": 12}, False),
        ((range(14), 3), (range(13), 3), {"recompute_at": 12}, True),
        # Longer prompts are computed by their length.
        ((range(9), 30), (range(12), 3), {"prompt_scaled_at": 12}, True),
        ((range(9), 3), (range(13), 3), {"prompt_scaled_at": 12}, False),
        ((range(14), 3), (range(13), 3), {"prompt_scaled_at": 12}, False),
        ((range(13), 3), ([*range(12), 99], 3), {"prompt_scaled_at": 12}, True),
        ((range(9), 3), (range(9), 3), {"shares_prefixes": False}, False),
    ],
)
def test_only_what_is_computed_alike_is_shared(
    first: Any, second: Any, limits: dict[str, Any], is_shared: bool
) -> None:
    desk = Desk(**limits)
    desk.submit(*first)
    desk.step()
    other = desk.submit(*second)
    desk.step()
    assert (other.num_cached_tokens > 0) is is_shared


@pytest.mark.parametrize("shares_prefixes", [True, False])
def test_salts_share_nothing_in_a_step_or_later(shares_prefixes: bool) -> None:
    desk = Desk(shares_prefixes=shares_prefixes)
    desk.submit(range(9), cache_salt="a")
    for salt in ("b", "", "ab"):
        desk.submit(range(9), cache_salt=salt)
    assert desk.step().chunks == {0: 9, 1: 9, 2: 9, 3: 9}, "not even what is only promised"
    again = [desk.submit(range(9), cache_salt=salt) for salt in ("b", "", "c", "a", "c")]
    if shares_prefixes:
        assert desk.step().chunks == {4: 1, 5: 1, 6: 9, 7: 1, 8: 1}
    else:
        assert desk.step().chunks == dict.fromkeys(range(4, 9), 9)
    tables = [entry.block_table for entry in again]
    held = [set(table.block_ids) for table in tables if table is not None]
    assert not held[0] & held[1] and not held[0] & held[3]
    desk.planner.integrity()


@pytest.mark.parametrize("shares_prefixes", [True, False])
def test_the_sequences_of_one_prompt_share_whatever_their_salt(shares_prefixes: bool) -> None:
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


# Two rows that fill a block each, and may both grow by another.
@pytest.mark.parametrize(("num_blocks", "guessed"), [(100, 4), (4, 4), (3, 0)])
def test_guesses_are_given_up_where_blocks_are_short(num_blocks: int, guessed: int) -> None:
    desk = Desk(num_blocks=num_blocks, speculate=4)
    for number in range(2):
        desk.submit((number, 2, 3), 5)
    desk.step()
    plan = desk.step()
    assert plan.asked == {0, 1} and desk.planner.num_preempted == 0
    assert plan.advance.speculate == guessed
    assert len(plan.advance.grown_blocks) == (2 if guessed else 0)


# As above: rows of 4 tokens that may be 9 by the end of the step, and 13 behind the next one.
@pytest.mark.parametrize(
    ("num_blocks", "guessed", "num_grown"), [(100, 4, 4), (8, 4, 4), (6, 2, 2), (4, None, 0)]
)
def test_a_step_ahead_has_blocks_for_whatever_the_one_before_may_give(
    num_blocks: int, guessed: int | None, num_grown: int
) -> None:
    desk = Desk(num_blocks=num_blocks, speculate=4, runs_ahead=True)
    for number in range(2):
        desk.submit((number, 2, 3), 30)
    desk.step()
    ahead = desk.planner.plan_ahead(desk.plan())
    if guessed is None:
        assert ahead is None
    else:
        assert ahead.advance.is_ahead and ahead.advance.speculate == guessed
        assert len(ahead.advance.grown_blocks) == num_grown


# Two rows with room for 12 tokens each; a third waits: for a row, for blocks, or for nothing.
@pytest.mark.parametrize(
    ("limits", "is_ahead"),
    [({"max_batch_size": 2}, True), ({"num_blocks": 7}, True), ({}, False)],
    ids=["rows", "blocks", "nothing"],
)
def test_a_step_is_launched_ahead_where_nobody_who_waits_can_come(
    limits: dict[str, Any], is_ahead: bool
) -> None:
    desk = Desk(runs_ahead=True, **limits)
    for number in range(2):
        desk.submit((number, 2, 3), 9)
    plan = desk.step()
    assert plan.admitted and desk.planner.plan_ahead(plan) is None, "who comes is computed first"
    waiting = desk.submit(range(20, 32), 20)
    plan = desk.plan()
    if not is_ahead:
        assert plan.admitted == [waiting] and desk.planner.plan_ahead(plan) is None
        return
    assert not plan.admitted and desk.planner.plan_ahead(plan) is not None
    # Each gets 8 tokens more; in the step before the last one both are known to leave.
    for _ in range(7):
        desk.settle(plan)
        plan = desk.plan()
        assert not plan.admitted
    assert desk.planner.plan_ahead(plan) is None
    desk.settle(plan, ending=[0, 1])
    assert desk.plan().admitted == [waiting]


def test_a_step_launched_ahead_keeps_nobody_waiting_for_more_than_itself() -> None:
    """A row ends in the step that is under way, which was not known."""
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


def test_no_guesses_behind_the_end_of_a_text() -> None:
    """A table is never longer than its longest context."""
    desk = Desk(speculate=50)
    entry = desk.submit((1, 2, 3), 9)
    desk.step()
    desk.step(num_tokens=3)
    assert len(entry.block_table.block_ids) == 3 and entry.num_computed == 6


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


def test_after_newcomers_have_failed_the_next_step_goes_without_any() -> None:
    desk = Desk()
    desk.submit((1, 2, 3))
    desk.step()
    failed = desk.submit((4, 5, 6))
    assert ids(desk.plan()) == [1]
    failed.state = EntryState.ENDED
    desk.planner.is_closed = True
    desk.submit((7, 8, 9))
    assert ids(desk.step()) == [] and ids(desk.step()) == [2]


def test_where_nobody_runs_the_door_is_open() -> None:
    desk = Desk()
    desk.planner.is_closed = True
    desk.submit((1, 2, 3))
    assert ids(desk.step()) == [0]
