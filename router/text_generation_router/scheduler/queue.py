"""Waiting entries, in order."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from text_generation_router.scheduler.entry import Entry, EntryState

_RANK = attrgetter("rank")


class Queue:
    """Waiting entries, which hold no blocks, by rank: higher priorities first, then the oldest.

    An entry that does not fit holds back the entries behind it. Therefore no entry starves because
    of later ones of its priority; it waits as long as there are entries of higher priority.
    Invariant: ranks ascend.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def append(self, entry: Entry) -> None:
        """Queues an entry: a new one behind the others of its priority, an admitted one in its old
        place."""
        entry.state = EntryState.QUEUED
        insort(self._entries, entry, key=_RANK)

    def first(self) -> Entry | None:
        """The entry that is admitted next."""
        return self._entries[0] if self._entries else None

    def pop(self) -> Entry:
        """Removes the first."""
        return self._entries.pop(0)

    def remove(self, entry: Entry) -> None:
        """Removes an entry that ended while it waited."""
        place = bisect_left(self._entries, entry.rank, key=_RANK)
        assert self._entries[place] is entry, "it is not in the queue"
        del self._entries[place]

    def integrity(self) -> None:
        """Asserts the invariants of the class."""
        ranks = [entry.rank for entry in self._entries]
        assert ranks == sorted(set(ranks)), "the queue is out of order"
        for entry in self._entries:
            assert entry.state is EntryState.QUEUED and entry.block_table is None
