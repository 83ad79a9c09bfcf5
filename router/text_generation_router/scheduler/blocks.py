"""Ids of KV blocks: which entry holds which. The memory itself is the shard's.

The token at position p of a request is in slot p % block_size of `block_ids[p // block_size]`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

# The blocks of one request, in order of position; changed by the BlockAllocator alone. The first
# blocks can be in several tables: they are full and are not written any more.
BlockTable = list[int]


class BlockAllocator:
    """Owns the block ids 0 … num_blocks - 1: each is held by tables, idle or free.

    A block that was marked by `keep` is idle when no table holds it: its tokens can be reused until
    the block is allocated again. The block that has been idle for the longest is allocated first.
    """

    def __init__(self, num_blocks: int, block_size: int, retains: bool = True) -> None:
        """Without `retains` no block is ever idle: a block without a table is free."""
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.forget: Callable[[int], None] = lambda block_id: None
        """Called with a kept block, held by no table, whose tokens are lost now."""
        self._retains = retains
        # A stack: the block used last is most likely still in the device's caches.
        self._free = list(reversed(range(num_blocks)))
        # Longest idle first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()
        # Reference count of each block.
        self._num_tables = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks held by tables."""
        return self.num_blocks - self.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` fill."""
        return -(-num_tokens // self.block_size)

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these are idle: sharing them leaves fewer to allocate."""
        return sum(block_id in self._idle for block_id in block_ids)

    def allocate(self, num_tokens: int, shared: Sequence[int] = ()) -> BlockTable:
        """A table with room for `num_tokens`, which the caller has checked to be available.

        It begins with the blocks `shared`, which are in other tables or idle.
        """
        num_blocks = self.num_blocks_for(num_tokens) - len(shared)
        assert 0 < num_blocks <= self.num_free - self.num_idle(shared), "check num_free first"
        for block_id in shared:
            assert self._num_tables[block_id] or block_id in self._idle, "it is free"
            self._idle.pop(block_id, None)
            self._num_tables[block_id] += 1
        return [*shared, *(self._take() for _ in range(num_blocks))]

    def grow(self, table: BlockTable) -> int:
        """Adds one block, which the caller has checked to be available, and returns its id."""
        table.append(self._take())
        return table[-1]

    def release(self, table: BlockTable) -> None:
        """Takes all blocks of a table back, once; the table is empty then.

        The last block becomes idle before the first, so that a text loses its end first.
        """
        assert table, "released twice"
        for block_id in reversed(table):
            self._num_tables[block_id] -= 1
            if self._num_tables[block_id]:
                continue
            if block_id not in self._kept:
                self._free.append(block_id)
            elif self._retains:
                self._idle[block_id] = None
            else:
                self._kept.discard(block_id)
                self._free.append(block_id)
                self.forget(block_id)
        table.clear()

    def keep(self, block_id: int) -> None:
        """Marks a block that a table holds: its tokens can be reused from now on."""
        assert self._num_tables[block_id] and block_id not in self._kept
        self._kept.add(block_id)

    def _take(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._idle.popitem(last=False)
            self._kept.discard(block_id)
            self.forget(block_id)
        self._num_tables[block_id] = 1
        return block_id
