"""Ids of KV blocks: which entry holds which, and which tokens are in them, so that equal beginnings
are computed once. The memory itself is the shard's.

The token at position p of a request is in slot p % block_size of `block_ids[p // block_size]`.

The key of a full block is its tokens and the block before it, back to the beginning of the text.
Keys are compared in full, not by hash: two texts share a block only if all tokens up to its end are
equal. Of a model that keeps a recurrent state per row, blocks are of use up to one whose end has a
snapshot of the state.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from text_generation_router.scheduler.costs import SchedulerLimits
from text_generation_router.scheduler.entry import BlockTable, Chain, Entry, Tokens

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


class BlockAllocator:
    """Owns the block ids 0 … num_blocks - 1, each held by tables, idle or free, and what is known
    of their tokens.

    A block that was published is idle when no table holds it: its tokens can be reused until the
    block is allocated again. The block that has been idle for the longest is allocated first.

    Promises: `match` returns blocks whose KV was written for exactly these tokens at this position,
    or will be by the step being planned. A node refers only to the one before it, so that no memory
    waits for a garbage collection. Behind a forgotten node nothing is found; the blocks there are
    forgotten when they have been idle for the longest.
    """

    def __init__(
        self, num_blocks: int, block_size: int, retains: bool = True, num_snapshots: int = 0
    ) -> None:
        """Without `retains` no block is ever idle: a block without a table is free."""
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.snapshots = Snapshots(num_snapshots)
        """Those of the blocks."""
        self._retains = retains
        # A stack: the block used last is most likely still in the device's caches.
        self._free = list(reversed(range(num_blocks)))
        # Longest idle first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        # Reference count of each block.
        self._num_tables = [0] * num_blocks
        # The published blocks.
        self._by_key: dict[tuple[Hashable, Tokens], _Node] = {}
        self._by_block: dict[int, _Node] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks held by tables."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Published blocks, in use or idle."""
        return len(self._by_block)

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
            if self._retains and block_id in self._by_block:
                self._idle[block_id] = None
            else:
                self._free.append(block_id)
                self._forget(block_id)
        table.clear()

    def _take(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._idle.popitem(last=False)
            self._forget(block_id)
        self._num_tables[block_id] = 1
        return block_id

    # ---- What is in the blocks ----

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
            key = (chain.tail, tokens)
            if (node := self._by_key.get(key)) is None:
                node = self._by_key[key] = self._by_block[block_id] = _Node(key, block_id)
            chain.tail, chain.num_blocks = node, chain.num_blocks + 1

    def _forget(self, block_id: int) -> None:
        """No table holds the block; its tokens, if known, are lost. A Chain, or the node behind,
        may hold its node."""
        node = self._by_block.pop(block_id, None)
        if node is None:
            return
        del self._by_key[node.key]
        node.is_known, node.key = False, (None, b"")
        if node.snapshot is not None:
            self.snapshots.give_back(node.snapshot)
            node.snapshot = None


class SharedBlocks(NamedTuple):
    """The cached blocks that an entry would share."""

    block_ids: list[int]
    chain: Chain | None
    # The snapshot of the state behind them, and how many tokens of its text are cached at all: the
    # place where it branches off. For models that keep a state per row.
    snapshot: int | None = None
    num_known: int = 0


class EntryBlocks:
    """Owns all blocks; the only one that changes the blocks of an entry."""

    def __init__(self, limits: SchedulerLimits) -> None:
        """Raises ValueError, for the user, if there is not a single block."""
        num_blocks = min(limits.num_blocks, limits.max_batch_total_tokens // limits.block_size)
        if num_blocks < 1:
            raise ValueError(
                f"`--max-batch-total-tokens` must be >= {limits.block_size}, one KV block. "
                f"Given: {limits.max_batch_total_tokens}"
            )
        self._limits = limits
        self.allocator = BlockAllocator(
            num_blocks, limits.block_size, limits.shares_prefixes, limits.num_snapshots or 0
        )
        self._keeps_state = limits.num_snapshots is not None
        # The sequence of a prompt with several that was admitted last and is to store its state.
        self._leader: Entry | None = None

    # ---- Before an entry runs ----

    def find(self, entry: Entry, pending: PendingBlocks, num_running: int) -> SharedBlocks | None:
        """The cached blocks that a waiting entry would share; None: there are too few for the rest.

        One block per running entry stays free, so that the next steps do not preempt the newcomer.
        A sequence of a prompt waits until another one, which computes it, has stored its state.
        """
        leader = self._leader
        if leader is not None and leader.stores and leader.group == entry.group:
            return None
        allocator, salt = self.allocator, self._salt(entry)
        shared: list[int] = []
        chain, snapshot, num_known = None if salt is None else Chain(salt), None, 0
        if salt is not None and not entry.needs_all_computed:
            # The last token is always computed: its output is the next token.
            blocks = entry.full_blocks(0, entry.num_tokens - 1, self._limits.block_size)
            shared, chain = self.allocator.match(salt, blocks, pending)
            if self._keeps_state:
                num_known = chain.num_blocks * self._limits.block_size
                snapshot = self.allocator.snapshots.cut_back(chain)
                del shared[chain.num_blocks :]
        num_new = allocator.num_blocks_for(entry.num_tokens + 1) - len(shared)
        if allocator.num_free - allocator.num_idle(shared) - num_new < num_running:
            return None
        return SharedBlocks(shared, chain, snapshot, num_known)

    def assign(self, entry: Entry, found: SharedBlocks) -> None:
        """Gives an entry the blocks that `find` has returned, and new ones for the rest."""
        entry.chain, entry.snapshot = found.chain, found.snapshot
        entry.block_table = self.allocator.allocate(entry.num_tokens + 1, found.block_ids)
        if self._keeps_state and entry.chain is not None:
            self._promise_snapshots(entry, entry.chain, found.num_known)

    def _promise_snapshots(self, entry: Entry, chain: Chain, num_known: int) -> None:
        """Has an entry store its state where its text branches off from known ones, and behind the
        last block of its prompt, from where the same prompt or a longer one can go on."""
        snapshots, block_size = self.allocator.snapshots, self._limits.block_size
        if entry.snapshot is not None:
            snapshots.use(entry.snapshot)
        last = (entry.prompt_tokens - 1) // block_size * block_size
        for position in sorted({num_known, last}):
            if position <= chain.num_blocks * block_size:
                continue
            if (snapshot := snapshots.promise()) is not None:
                entry.stores[position] = snapshot
        if entry.group is not None:
            self._leader = entry

    def _salt(self, entry: Entry) -> Hashable:
        """What the KV of an entry depends on beyond its tokens; None: it shares no blocks. For
        models that scale long contexts, lengths are a part of it."""
        limits, num_prompt = self._limits, entry.prompt_tokens
        limit, is_long = limits.recompute_at, False
        if limit is not None:
            is_long = entry.num_tokens > limit
            if not is_long and entry.max_context > limit:
                return None  # its blocks are rewritten when it crosses the limit
        scale = num_prompt if num_prompt > (limits.prompt_scaled_at or num_prompt) else 0
        if limits.shares_prefixes:
            return (entry.request.cache_salt, is_long, scale)
        return None if entry.group is None else (entry.group, is_long, scale)

    # ---- What is in the blocks ----

    def expect(self, entry: Entry, chunk: int, pending: PendingBlocks) -> None:
        """Adds the blocks that the next step fills with `chunk` tokens of this entry."""
        # The state behind pending blocks is not known before they are computed.
        if (chain := entry.chain) is not None and not self._keeps_state:
            unknown = self._unknown(entry, chain, entry.num_computed + chunk)
            self.allocator.expect(chain, *unknown, pending)

    def publish(self, entry: Entry) -> None:
        """Adds the blocks that are computed to the prefix cache, and the states that are stored."""
        chain = entry.chain
        if chain is None or entry.num_computed // self._limits.block_size <= chain.num_blocks:
            return
        for position in [each for each in entry.stores if each <= entry.num_computed]:
            self.allocator.publish(chain, *self._unknown(entry, chain, position))
            self.allocator.snapshots.keep(chain, entry.stores.pop(position))
        self.allocator.publish(chain, *self._unknown(entry, chain, entry.num_computed))

    def _unknown(
        self, entry: Entry, chain: Chain, num_tokens: int
    ) -> tuple[Iterable[Tokens], list[int]]:
        """The full blocks behind its chain: their tokens and their ids."""
        assert entry.block_table is not None
        blocks = entry.full_blocks(chain.num_blocks, num_tokens, self._limits.block_size)
        return blocks, entry.block_table[chain.num_blocks :]

    # ---- While an entry runs ----

    def lacking(self, entries: Iterable[Entry], num_more: int) -> list[Entry]:
        """The entries that lack blocks for `num_more` more tokens, at most up to their ends: each
        once for every block."""
        found: list[Entry] = []
        for entry in entries:
            assert entry.block_table is not None
            num_tokens = min(entry.num_tokens + num_more, entry.max_context)
            num_lacking = -(-num_tokens // self._limits.block_size) - len(entry.block_table)
            found += [entry] * num_lacking
        return found

    def take_ahead(
        self, entries: Iterable[Entry], num_more: int, speculate: int
    ) -> tuple[int, list[tuple[int, int]]] | None:
        """Gives each entry blocks for `num_more` more tokens, and behind them for as many draft
        tokens as there are blocks for, at most `speculate`. Returns how many draft tokens, and
        entry ids and block ids; None, and nothing changed, if `num_more` are too many."""
        num_free = self.allocator.num_free
        while len(lacking := self.lacking(entries, num_more + speculate)) > num_free:
            if not speculate:
                return None
            speculate //= 2
        taken = []
        for entry in lacking:
            taken.append((entry.id, self.take(entry)))
        return speculate, taken

    def take(self, entry: Entry) -> int:
        """Gives an entry one more block, which must be free."""
        assert entry.block_table is not None
        return self.allocator.grow(entry.block_table)

    def release(self, entry: Entry) -> None:
        """Takes all blocks of an entry back. No step in flight may write to them."""
        assert entry.block_table is not None
        self.allocator.release(entry.block_table)
        for snapshot in entry.stores.values():
            self.allocator.snapshots.give_back(snapshot)
        entry.block_table = entry.chain = entry.snapshot = None
        entry.stores = {}
