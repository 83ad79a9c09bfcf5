"""Numbers of KV blocks: who holds which. The memory behind the numbers is the shard's.

The token at position p of a request is in slot p % block_size of `block_ids[p // block_size]`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request, in order of position; changed by the BlockAllocator alone."""

    block_size: int
    block_ids: list[int] = field(default_factory=list)

    @property
    def num_slots(self) -> int:
        """How many tokens there is room for."""
        return len(self.block_ids) * self.block_size


class BlockAllocator:
    """Owns the block numbers 0 … num_blocks - 1: each is free or in exactly one table."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: what was used last is most likely still in the device's caches.
        self._free = list(reversed(range(num_blocks)))

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

    def allocate(self, num_tokens: int) -> BlockTable:
        """A table with room for `num_tokens`, which the caller has checked to be available."""
        num_blocks = self.num_blocks_for(num_tokens)
        assert num_blocks <= self.num_free, "allocated without asking num_free first"
        return BlockTable(self.block_size, [self._free.pop() for _ in range(num_blocks)])

    def grow(self, table: BlockTable) -> int | None:
        """Adds one block to a table and returns its number; None when no block is free."""
        if not self._free:
            return None
        block_id = self._free.pop()
        table.block_ids.append(block_id)
        return block_id

    def release(self, table: BlockTable) -> None:
        """Takes all blocks of a table back, once; the table is empty and of no more use."""
        assert table.block_ids, "released twice"
        self._free.extend(reversed(table.block_ids))
        table.block_ids = []

    def integrity(self, tables: Iterable[BlockTable]) -> None:
        """Asserts that `tables` are all tables: free and held blocks are all blocks, each once."""
        blocks = self._free + [block_id for table in tables for block_id in table.block_ids]
        assert sorted(blocks) == list(range(self.num_blocks)), "blocks lost or held twice"
