import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.scheduler.blocks import BlockAllocator


def test_a_table_covers_its_tokens_and_no_more() -> None:
    for num_tokens, num_blocks in ((1, 1), (15, 1), (16, 1), (17, 2), (33, 3)):
        allocator = BlockAllocator(4, 16)
        table = allocator.allocate(num_tokens)
        assert len(table.block_ids) == num_blocks == allocator.num_blocks_for(num_tokens)
        assert table.num_slots == 16 * num_blocks
        assert (allocator.num_used, allocator.num_free) == (num_blocks, 4 - num_blocks)


def test_no_block_is_held_twice() -> None:
    allocator = BlockAllocator(8, 4)
    first, second = allocator.allocate(10), allocator.allocate(17)
    assert set(first.block_ids) | set(second.block_ids) == set(range(8))
    assert allocator.grow(first) is None
    allocator.release(second)
    assert allocator.grow(first) == first.block_ids[-1] and len(first.block_ids) == 4
    allocator.integrity([first])


def test_misuse_is_caught() -> None:
    allocator = BlockAllocator(2, 4)
    table = allocator.allocate(8)
    with pytest.raises(AssertionError, match="without asking"):
        allocator.allocate(1)
    with pytest.raises(AssertionError, match="lost or held twice"):
        allocator.integrity([])
    allocator.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release(table)


@given(st.integers(1, 20), st.lists(st.tuples(st.sampled_from("agr"), st.integers(1, 9))))
def test_nothing_is_ever_lost(num_blocks: int, steps: list[tuple[str, int]]) -> None:
    allocator = BlockAllocator(num_blocks, 3)
    tables = []
    for step, number in steps:
        if step == "a":
            if allocator.num_blocks_for(number) <= allocator.num_free:
                tables.append(allocator.allocate(number))
        elif tables and step == "g":
            allocator.grow(tables[number % len(tables)])
        elif tables:
            allocator.release(tables.pop(number % len(tables)))
        allocator.integrity(tables)
