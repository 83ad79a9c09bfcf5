import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.scheduler.blocks import BlockAllocator, BlockTable


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
    with pytest.raises(AssertionError, match="check num_free"):
        allocator.allocate(1)
    with pytest.raises(AssertionError, match="lost or held twice"):
        allocator.integrity([])
    allocator.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release(table)


def test_shared_blocks_are_free_when_their_last_table_is_released() -> None:
    allocator = BlockAllocator(6, 4)
    first = allocator.allocate(12)
    second = allocator.allocate(12, first.block_ids[:2])
    assert second.block_ids[:2] == first.block_ids[:2] and allocator.num_used == 4
    shared = second.block_ids[:2]
    allocator.release(first)
    allocator.integrity([second])
    assert allocator.num_used == 3
    assert not set(allocator.allocate(12).block_ids) & set(shared)
    allocator.release(second)
    assert allocator.num_used == 3


def test_only_held_blocks_can_be_shared_and_not_all_of_them() -> None:
    allocator = BlockAllocator(3, 4)
    table = allocator.allocate(8)
    with pytest.raises(AssertionError, match="check num_free"):
        allocator.allocate(8, table.block_ids)
    shared = list(table.block_ids)
    allocator.release(table)
    with pytest.raises(AssertionError, match="it is free"):
        allocator.allocate(12, shared)


def test_a_count_that_is_wrong_is_noticed() -> None:
    allocator = BlockAllocator(6, 4)
    first = allocator.allocate(12)
    second = allocator.allocate(12, first.block_ids[:1])
    with pytest.raises(AssertionError, match="lost or held twice"):
        allocator.integrity([first])
    second.block_ids[0] = first.block_ids[1]
    with pytest.raises(AssertionError, match="lost or held twice"):
        allocator.integrity([first, second])


@given(
    st.integers(1, 20), st.lists(st.tuples(st.sampled_from("asgr"), st.integers(1, 9)), max_size=60)
)
def test_nothing_is_ever_lost(num_blocks: int, steps: list[tuple[str, int]]) -> None:
    allocator = BlockAllocator(num_blocks, 3)
    tables: list[BlockTable] = []
    for step, number in steps:
        if step == "a":
            if allocator.num_blocks_for(number) <= allocator.num_free:
                tables.append(allocator.allocate(number))
        elif tables and step == "s":
            shared = tables[number % len(tables)].block_ids[:-1]
            if allocator.num_free:
                tables.append(allocator.allocate(3 * len(shared) + 1, shared))
        elif tables and step == "g":
            allocator.grow(tables[number % len(tables)])
        elif tables:
            allocator.release(tables.pop(number % len(tables)))
        allocator.integrity(tables)
    for table in tables:
        allocator.release(table)
    assert allocator.num_free == num_blocks
