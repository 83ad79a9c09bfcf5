"""Who waits, in which order."""

from collections import deque
from collections.abc import Iterator

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

    def first(self) -> Entry | None:
        """Whose turn it is."""
        return self._entries[0] if self._entries else None

    def pop(self) -> Entry:
        """Takes the first out."""
        return self._entries.popleft()

    def remove(self, entry: Entry) -> None:
        """Forgets an entry that ended here."""
        self._entries.remove(entry)

    def integrity(self) -> None:
        """Asserts the invariants of the class."""
        ids = [entry.id for entry in self._entries]
        assert ids == sorted(set(ids)), "the queue is out of order"
        for entry in self._entries:
            assert entry.state is EntryState.QUEUED and entry.block_table is None
