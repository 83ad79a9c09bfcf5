import pytest
from text_generation_router.scheduler.answer import Answer
from text_generation_router.scheduler.blocks import BlockAllocator
from text_generation_router.scheduler.entry import Entry, EntryState
from text_generation_router.scheduler.queue import Queue

from router.tests.scheduling import make_request, make_tokenizer

TOKENIZER = make_tokenizer()


def queue_of(*lengths: int) -> Queue:
    """Entries 0, 1, … with prompts of the given lengths."""
    queue = Queue()
    for entry_id, length in enumerate(lengths):
        request = make_request(range(length))
        queue.append(Entry(entry_id, request, Answer(request, TOKENIZER)))
    return queue


@pytest.mark.parametrize(
    ("lengths", "limits", "admitted"),
    [
        ([], {}, []),
        ([3, 3, 3], {}, [0, 1, 2]),
        # Rows.
        ([3, 3, 3], {"max_size": 2}, [0, 1]),
        ([3, 3, 3], {"max_size": 0}, []),
        # Prefill tokens: up to the limit, not past it; a long prompt goes alone.
        ([3, 3, 3], {"max_prefill_tokens": 6}, [0, 1]),
        ([3, 3, 3], {"max_prefill_tokens": 5}, [0]),
        ([9, 1], {"max_prefill_tokens": 4}, [0]),
        ([1, 9, 1], {"max_prefill_tokens": 4}, [0]),
        # Nobody overtakes.
        ([1, 9, 1], {"max_prefill_tokens": 9}, [0]),
        # Enough or nobody.
        ([3, 3], {"min_size": 2}, [0, 1]),
        ([3, 3], {"min_size": 3}, []),
        ([3, 3, 3], {"min_size": 2, "max_prefill_tokens": 5}, []),
        # Blocks of 4: the next token needs room too.
        ([3], {"num_blocks": 1}, [0]),
        ([4], {"num_blocks": 1}, []),
        ([4], {"num_blocks": 2}, [0]),
        # One block stays free for each entry that runs beside the newest.
        ([3], {"num_blocks": 3, "num_running": 2}, [0]),
        ([3], {"num_blocks": 2, "num_running": 2}, []),
        ([3, 3], {"num_blocks": 3}, [0, 1]),
        ([3, 3], {"num_blocks": 2}, [0]),
        ([3, 3, 3], {"num_blocks": 5}, [0, 1, 2]),
        ([3, 3, 3], {"num_blocks": 4}, [0, 1]),
    ],
)
def test_who_is_let_in(lengths: list[int], limits: dict[str, int], admitted: list[int]) -> None:
    queue = queue_of(*lengths)
    given = {"min_size": 0, "max_size": 100, "max_prefill_tokens": 100, "num_running": 0}
    allocator = BlockAllocator(limits.pop("num_blocks", 100), 4)
    entries = queue.next_batch(allocator, **(given | limits))
    assert [entry.id for entry in entries] == admitted
    # Those who were let in have room for the next token, the others left no trace.
    for entry, length in zip(entries, lengths, strict=False):
        assert entry.state is EntryState.RUNNING
        assert entry.block_table.num_slots >= length + 1 > entry.block_table.num_slots - 4
    assert [entry.id for entry in queue] == list(range(len(lengths)))[len(admitted) :]
    queue.integrity()
    allocator.integrity([entry.block_table for entry in entries])


def test_the_preempted_come_back_first_and_in_order() -> None:
    queue = queue_of(3, 3, 3, 3)
    allocator = BlockAllocator(100, 4)
    limits = {"min_size": 0, "max_prefill_tokens": 100, "num_running": 0}
    entries = queue.next_batch(allocator, max_size=3, **limits)
    for entry in reversed(entries[1:]):
        allocator.release(entry.block_table)
        entry.block_table = None
        entry.token_ids.append(7)
        queue.put_back(entry)
    queue.integrity()
    assert [entry.id for entry in queue] == [1, 2, 3]
    [first, *_] = queue.next_batch(allocator, max_size=3, **limits)
    assert first.input_ids == (0, 1, 2, 7)
    assert first.block_table.num_slots == 8


def siblings_of(length: int, num: int) -> Queue:
    """Entries 0, 1, … of one prompt."""
    queue = queue_of(*[length] * num)
    entries = list(queue)
    for entry in entries:
        entry.siblings = entries
    return queue


@pytest.mark.parametrize(
    ("limits", "admitted"),
    [
        # A prompt of 10 in blocks of 4: two are shared, each has one of its own and 2 tokens to do.
        ({}, [0, 1, 2, 3]),
        ({"max_size": 2}, [0, 1]),
        ({"max_prefill_tokens": 16}, [0, 1, 2, 3]),
        ({"max_prefill_tokens": 15}, [0, 1, 2]),
        ({"max_prefill_tokens": 2}, [0]),
        # With a block kept free for each but the newest: 2 + 4 + 3.
        ({"num_blocks": 9}, [0, 1, 2, 3]),
        ({"num_blocks": 8}, [0, 1, 2]),
        ({"num_blocks": 3}, [0]),
    ],
)
def test_siblings_share(limits: dict[str, int], admitted: list[int]) -> None:
    queue = siblings_of(10, 4)
    given = {"min_size": 0, "max_size": 100, "max_prefill_tokens": 100, "num_running": 0}
    allocator = BlockAllocator(limits.pop("num_blocks", 100), 4)
    entries = queue.next_batch(allocator, **(given | limits))
    assert [entry.id for entry in entries] == admitted
    assert [entry.num_cached_tokens for entry in entries] == [0, *[8] * (len(admitted) - 1)]
    for entry in entries:
        assert entry.block_table.block_ids[:2] == entries[0].block_table.block_ids[:2]
        assert entry.block_table.num_slots == 12
    assert allocator.num_used == 2 + len(admitted)
    allocator.integrity([entry.block_table for entry in entries])


def test_who_comes_later_shares_with_a_sibling_that_runs_only() -> None:
    queue, allocator = siblings_of(10, 3), BlockAllocator(100, 4)
    limits = {"min_size": 0, "max_prefill_tokens": 3, "max_size": 1}
    [first] = queue.next_batch(allocator, num_running=0, **limits)
    [second] = queue.next_batch(allocator, num_running=1, **limits)
    assert second.num_cached_tokens == 8
    for entry in (first, second):
        allocator.release(entry.block_table)
        entry.block_table = None
    second.token_ids += [7] * 5
    queue.put_back(second)
    [again] = queue.next_batch(allocator, num_running=0, **limits)
    assert again is second and second.num_cached_tokens == 0
    [third] = queue.next_batch(allocator, num_running=1, **limits)
    assert third.num_cached_tokens == 8
    allocator.integrity([second.block_table, third.block_table])


def test_remove() -> None:
    queue = queue_of(1, 1, 1)
    queue.remove(list(queue)[1])
    assert [entry.id for entry in queue] == [0, 2] and len(queue) == 2


def test_disorder_is_noticed() -> None:
    queue = queue_of(1, 1)
    first = next(iter(queue))
    queue.remove(first)
    queue.append(first)
    with pytest.raises(AssertionError, match="out of order"):
        queue.integrity()
