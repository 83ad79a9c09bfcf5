"""Pages of the KV cache, brought there before they are needed, while nothing is computed.

Why it is fast: the system gives a page of memory when it is first written, which takes it 0.7 us,
and 11 us in a virtual machine whose host has to find the page too. A prompt of 2,048 tokens of the
125 M checkpoint writes 11,500 pages: up to 130 of its 870 ms. Not all at once: that would be
seconds at the start, and memory that most servers never need.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

logger = logging.getLogger(__name__)

# From linux/mman.h; Linux 5.14 is the first that has it. What was written stays as it is.
_POPULATE_WRITE = 23
_PAGE_BYTES = 4096
# So much beyond the highest block in use is brought there.
_AHEAD_BYTES = 512 * 2**20
# At once: some 3 ms, by which a request that comes meanwhile is slowed down a little.
_PIECE_BYTES = 2**20
# Nothing was computed at so many looks one after the other.
_IDLE_LOOKS = 3
_LOOK_S = 0.04


@dataclass(frozen=True, slots=True)
class Parts:
    """Memory of `count` parts one behind the other, in each of which every block has its place, one
    behind the other: `block_bytes` each."""

    address: int
    count: int
    num_blocks: int
    block_bytes: int

    def regions(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Address and bytes of the pages that blocks [first, last) lie in. The address of all is
        that of a page."""
        for part in range(self.count):
            start = part * self.num_blocks * self.block_bytes
            begin = (start + first * self.block_bytes) // _PAGE_BYTES * _PAGE_BYTES
            end = -(-(start + last * self.block_bytes) // _PAGE_BYTES) * _PAGE_BYTES
            yield self.address + begin, end - begin


class FirstTouch:
    """Owns the knowledge of how much of a cache is there. `run` is the body of a thread; the other
    methods are the engine's."""

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        """`is_busy`: whether anything is being computed; asked from the thread."""
        self._is_busy = is_busy
        # Held while pages are brought, so that no cache goes away meanwhile.
        self._lock = threading.Lock()
        self._has_work = threading.Event()
        self._parts: Parts | None = None
        # Blocks that are there, and that should be.
        self._num_there = 0
        self._num_wanted = 0

    def follow(self, parts: Parts | None) -> None:
        """Another cache, which nobody has written to; None: there is none, and what was there may
        go."""
        with self._lock:
            self._parts, self._num_there, self._num_wanted = parts, 0, 0
        self.note_use(0)

    def note_use(self, num_blocks: int) -> None:
        """The first so many blocks are in use, or have been."""
        if (parts := self._parts) is None:
            return
        ahead = _AHEAD_BYTES // (parts.count * parts.block_bytes)
        wanted = min(parts.num_blocks, num_blocks + ahead)
        # Some at once, so that the thread is not woken by every request.
        if wanted > self._num_wanted + ahead // 8 or self._num_wanted == 0:
            self._num_wanted = wanted
            self._has_work.set()

    def run(self) -> None:
        """Bring pages whenever some are missing and nothing is computed; never returns, unless the
        system does not know how."""
        populate = _populate()
        while self._has_work.wait():
            self._has_work.clear()
            while self._num_there < self._num_wanted:
                self._wait_until_idle()
                if not self._bring_piece(populate):
                    logger.info("this system does not bring pages of memory beforehand")
                    return

    def _bring_piece(self, populate: Callable[[int, int], bool]) -> bool:
        with self._lock:
            if (parts := self._parts) is None:
                return True
            first = self._num_there
            count = max(1, _PIECE_BYTES // (parts.count * parts.block_bytes))
            self._num_there = last = min(first + count, parts.num_blocks)
            return all(populate(*region) for region in parts.regions(first, last))

    def _wait_until_idle(self) -> None:
        looks = 0 if self._is_busy() else _IDLE_LOOKS
        while looks < _IDLE_LOOKS:
            time.sleep(_LOOK_S)
            looks = 0 if self._is_busy() else looks + 1


def _populate() -> Callable[[int, int], bool]:
    """What brings the pages of (address, bytes), and says whether the system can."""
    system = getattr(ctypes.CDLL(None), "madvise", None)

    def populate(address: int, size: int) -> bool:
        return system is not None and not system(
            ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE
        )

    return populate
