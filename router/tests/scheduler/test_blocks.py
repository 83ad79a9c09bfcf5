from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.scheduler.blocks import BlockAllocator, BlockTable


def test_a_table_covers_its_tokens_and_no_more() -> None:
    for num_tokens, num_blocks in ((1, 1), (15, 1), (16, 1), (17, 2), (33, 3)):
        allocator = BlockAllocator(4, 16)
        table = allocator.allocate(num_tokens)
        assert len(table) == num_blocks == allocator.num_blocks_for(num_tokens)
        assert (allocator.num_used, allocator.num_free) == (num_blocks, 4 - num_blocks)


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
            shared = tables[number % len(tables)][:-1]
            if allocator.num_free:
                tables.append(allocator.allocate(3 * len(shared) + 1, shared))
        elif tables and step == "g":
            if allocator.num_free:
                allocator.grow(tables[number % len(tables)])
        elif tables:
            allocator.release(tables.pop(number % len(tables)))
        allocator.integrity(tables)
    for table in tables:
        allocator.release(table)
    assert allocator.num_free == num_blocks
