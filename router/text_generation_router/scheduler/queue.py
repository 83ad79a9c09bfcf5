"""Who is let in next. Pure policy: values in, entries out, no waiting."""

from collections import deque
from collections.abc import Iterator, Sequence

from text_generation_router.scheduler.blocks import BlockAllocator
from text_generation_router.scheduler.entry import Entry, EntryState


class Queue:
    """Entries that hold no blocks and wait for their turn, oldest first.

    First come, first served, without exception: an entry that does not fit holds back those behind
    it, so nobody starves. Invariant: ids ascend, because a preempted entry is older than everyone
    who was still waiting.
    """

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def append(self, entry: Entry) -> None:
        """Queues a new entry."""
        self._entries.append(entry)

    def put_back(self, entry: Entry) -> None:
        """Queues a preempted entry before all others."""
        entry.state = EntryState.QUEUED
        self._entries.appendleft(entry)

    def remove(self, entry: Entry) -> None:
        """Forgets an entry that ended here."""
        self._entries.remove(entry)

    def next_batch(
        self,
        allocator: BlockAllocator,
        *,
        min_size: int,
        max_size: int,
        max_prefill_tokens: int,
        num_running: int,
    ) -> list[Entry]:
        """Lets in the longest head of the queue that fits, with blocks for its tokens and the next.

        At most `max_size` entries and `max_prefill_tokens` tokens (but one longer prompt is let in
        alone); nobody if it would be fewer than `min_size`. A block is kept free for every entry
        that then runs but the newest, so that a newcomer is not preempted by the next few steps.
        What an entry shares with a sibling that runs or is let in before it costs nothing.
        """
        size = 0
        num_tokens = 0
        num_free = allocator.num_free - num_running
        previous: Entry | None = None
        for entry in self._entries:
            num_shared = 0
            # Siblings follow one another: no other entry has an id between theirs.
            if entry.sharing_table is not None or _is_sibling(entry, previous):
                num_shared = entry.num_shareable_blocks(allocator.block_size)
            num_tokens += entry.num_tokens - num_shared * allocator.block_size
            num_free -= allocator.num_blocks_for(entry.num_tokens + 1) - num_shared
            if size == max_size or num_free < 0 or (size > 0 and num_tokens > max_prefill_tokens):
                break
            num_free -= 1
            size += 1
            previous = entry
        if size < min_size:
            return []
        admitted = [self._entries.popleft() for _ in range(size)]
        for entry in admitted:
            _allocate(entry, allocator)
        return admitted

    def integrity(self) -> None:
        """Asserts the invariants of the class."""
        ids = [entry.id for entry in self._entries]
        assert ids == sorted(set(ids)), "the queue is out of order"
        for entry in self._entries:
            assert entry.state is EntryState.QUEUED and entry.block_table is None


def _is_sibling(entry: Entry, previous: Entry | None) -> bool:
    return previous is not None and any(sibling is previous for sibling in entry.siblings)


def _allocate(entry: Entry, allocator: BlockAllocator) -> None:
    """Blocks for what the entry computes now; the prompt's are a sibling's if one has them.

    That sibling's prompt is computed: in an earlier prefill, or before the entry in this one.
    """
    shared: Sequence[int] = ()
    if (table := entry.sharing_table) is not None:
        shared = table.block_ids[: entry.num_shareable_blocks(allocator.block_size)]
    entry.num_cached_tokens = len(shared) * allocator.block_size
    entry.block_table = allocator.allocate(entry.num_tokens + 1, shared)
    entry.state = EntryState.RUNNING
