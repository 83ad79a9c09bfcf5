"""Which KV blocks an entry holds, shares and still needs."""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from text_generation_router.scheduler.blocks import BlockAllocator, Chain, PendingBlocks, Tokens
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.plan import SchedulerLimits


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
