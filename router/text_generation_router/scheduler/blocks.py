"""Numbers of KV blocks: who holds which. The memory behind the numbers is the shard's.

The token at position p of a request is in slot p % block_size of `block_ids[p // block_size]`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request, in order of position; changed by the BlockAllocator alone.

    The first ones can be in several tables: nobody writes to those any more.
    """

    block_size: int
    block_ids: list[int] = field(default_factory=list)

    @property
    def num_slots(self) -> int:
        """How many tokens there is room for."""
        return len(self.block_ids) * self.block_size


class BlockAllocator:
    """Owns the block numbers 0 … num_blocks - 1: each is free or in the tables that are counted."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: what was used last is most likely still in the device's caches.
        self._free = list(reversed(range(num_blocks)))
        # In how many tables each block is.
        self._num_tables = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be given out."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks held by tables."""
        return self.num_blocks - len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks so many tokens fill."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_tokens: int, shared: Sequence[int] = ()) -> BlockTable:
        """A table with room for `num_tokens`, which the caller has checked to be available.

        It begins with the blocks `shared`, which are in another table and stay there.
        """
        num_blocks = self.num_blocks_for(num_tokens) - len(shared)
        assert 0 < num_blocks <= self.num_free, "allocated without asking num_free first"
        for block_id in shared:
            assert self._num_tables[block_id] > 0, "a free block cannot be shared"
            self._num_tables[block_id] += 1
        return BlockTable(self.block_size, [*shared, *(self._take() for _ in range(num_blocks))])

    def grow(self, table: BlockTable) -> int | None:
        """Adds one block to a table and returns its number; None when no block is free."""
        if not self._free:
            return None
        block_id = self._take()
        table.block_ids.append(block_id)
        return block_id

    def release(self, table: BlockTable) -> None:
        """Takes all blocks of a table back, once; the table is empty and of no more use.

        A block is free when the last of its tables is released.
        """
        assert table.block_ids, "released twice"
        for block_id in reversed(table.block_ids):
            self._num_tables[block_id] -= 1
            if not self._num_tables[block_id]:
                self._free.append(block_id)
        table.block_ids = []

    def integrity(self, tables: Iterable[BlockTable]) -> None:
        """Asserts that `tables` are all tables: each block is free or in as many as are counted."""
        held = Counter(block_id for table in tables for block_id in set(table.block_ids))
        counts = [held[block_id] for block_id in range(self.num_blocks)]
        assert counts == self._num_tables, "blocks lost or held twice"
        free = [block_id for block_id, count in enumerate(counts) if not count]
        assert sorted(self._free) == free, "blocks lost or held twice"

    def _take(self) -> int:
        block_id = self._free.pop()
        self._num_tables[block_id] = 1
        return block_id
