"""The prefix cache: which KV blocks hold which tokens, so that equal beginnings are computed once.

The key of a full block is its tokens and the block before it, back to the beginning of the text.
Keys are compared in full, not by hash: two texts share a block only if all tokens up to its end are
equal. Of a model that keeps a recurrent state per row, blocks are of use up to one whose end has a
snapshot of the state.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from text_generation_router.scheduler.blocks import BlockAllocator

# The tokens of one full block, packed (`Entry.full_blocks`): the cache only compares them.
Tokens = bytes
# The root of a text: texts with different salts share nothing.
Salt = Hashable


@dataclass(slots=True, eq=False)
class _Node:
    """One cached block."""

    # The node of the block before it, or the salt for the first; and the tokens.
    key: tuple[Hashable, Tokens]
    block_id: int
    is_known: bool = True
    # The snapshot of the state at its end.
    snapshot: int | None = None


@dataclass(slots=True)
class Chain:
    """How much of one request's text is in the cache; changed by the PrefixCache alone."""

    # The last node, or the salt when there is none.
    tail: Hashable
    num_blocks: int = 0


# Blocks that the step being planned will write; of no use after its launch.
PendingBlocks = dict[tuple[Hashable, Tokens], tuple[object, int]]


class Snapshots:
    """Owns the ids 0 … num_snapshots - 1: each is free, promised to an entry, which stores it, or
    of a cached block. Where none is free, the one that was used least recently is reused."""

    def __init__(self, num_snapshots: int) -> None:
        self._free = list(reversed(range(num_snapshots)))
        # Least recently used first.
        self._nodes: OrderedDict[int, _Node] = OrderedDict()

    def cut_back(self, chain: Chain) -> int | None:
        """Shortens a chain of known blocks to the last one with a snapshot, which it returns; None:
        no block has one."""
        while isinstance(node := chain.tail, _Node):
            if node.snapshot is not None:
                return node.snapshot
            chain.tail, chain.num_blocks = node.key[0], chain.num_blocks - 1
        return None

    def promise(self) -> int | None:
        """An id for a state that will be stored; None: all are promised."""
        if self._free:
            return self._free.pop()
        if not self._nodes:
            return None
        snapshot, node = self._nodes.popitem(last=False)
        node.snapshot = None
        return snapshot

    def keep(self, chain: Chain, snapshot: int) -> None:
        """The promised state is stored: that at the end of a chain, if it is known that far."""
        node = chain.tail
        assert isinstance(node, _Node), "it is behind a block"
        if node.is_known and node.snapshot is None:
            node.snapshot, self._nodes[snapshot] = snapshot, node
        else:
            self.give_back(snapshot)

    def use(self, snapshot: int) -> None:
        """A state begins from it: it was used last."""
        self._nodes.move_to_end(snapshot)

    def give_back(self, snapshot: int) -> None:
        """A promised one is not stored, or a block with one is forgotten."""
        self._nodes.pop(snapshot, None)
        self._free.append(snapshot)


class PrefixCache:
    """Owns the knowledge of which tokens are in the blocks; the BlockAllocator owns the blocks.

    Promises: `match` returns blocks whose KV was written for exactly these tokens at this position,
    or will be by the step being planned. A node refers only to the one before it, so that no memory
    waits for a garbage collection. Behind a forgotten node nothing is found; the blocks there are
    forgotten when they have been idle for the longest.
    """

    def __init__(self, allocator: BlockAllocator, num_snapshots: int = 0) -> None:
        self._allocator = allocator
        self.snapshots = Snapshots(num_snapshots)
        """Those of its blocks."""
        allocator.forget = self._forget
        self._by_key: dict[tuple[Hashable, Tokens], _Node] = {}
        self._by_block: dict[int, _Node] = {}

    def __len__(self) -> int:
        """Number of cached blocks."""
        return len(self._by_block)

    def match(
        self, salt: Salt, blocks: Iterable[Tokens], pending: PendingBlocks
    ) -> tuple[list[int], Chain]:
        """The blocks that hold the beginning of a text, given as the tokens of its full blocks.

        Pending blocks are not in the Chain yet; `publish` adds them.
        """
        chain = Chain(salt)
        block_ids: list[int] = []
        pending_tail: Hashable = None
        for tokens in blocks:
            node = self._by_key.get((chain.tail, tokens)) if pending_tail is None else None
            if node is not None:
                block_ids.append(node.block_id)
                chain.tail, chain.num_blocks = node, chain.num_blocks + 1
                continue
            tail = chain.tail if pending_tail is None else pending_tail
            expected = pending.get((tail, tokens))
            if expected is None:
                break
            pending_tail, block_id = expected
            block_ids.append(block_id)
        return block_ids, chain

    def expect(
        self,
        chain: Chain,
        blocks: Iterable[Tokens],
        block_ids: Iterable[int],
        pending: PendingBlocks,
    ) -> None:
        """Adds the blocks behind `chain` to the pending ones."""
        tail: Hashable = chain.tail
        for tokens, block_id in zip(blocks, block_ids, strict=False):
            if (node := self._by_key.get((tail, tokens))) is not None:
                tail = node
            else:
                tail, _ = pending.setdefault((tail, tokens), (object(), block_id))

    def publish(self, chain: Chain, blocks: Iterable[Tokens], block_ids: Iterable[int]) -> None:
        """Adds the blocks behind `chain`: their KV is written, and a table holds them.

        Where another block has the same tokens, the chain continues from that one.
        """
        for tokens, block_id in zip(blocks, block_ids, strict=False):
            if isinstance(chain.tail, _Node) and not chain.tail.is_known:
                return  # the block before this one is forgotten
            node = self._by_key.get((chain.tail, tokens))
            if node is None:
                node = self._add((chain.tail, tokens), block_id)
            chain.tail, chain.num_blocks = node, chain.num_blocks + 1

    def _add(self, key: tuple[Hashable, Tokens], block_id: int) -> _Node:
        node = _Node(key, block_id)
        self._by_key[key] = self._by_block[block_id] = node
        self._allocator.keep(block_id)
        return node

    def _forget(self, block_id: int) -> None:
        """The allocator has given a block away. A Chain, or the node behind, may hold its node."""
        node = self._by_block.pop(block_id)
        del self._by_key[node.key]
        node.is_known, node.key = False, (None, b"")
        if node.snapshot is not None:
            self.snapshots.give_back(node.snapshot)
            node.snapshot = None
