"""Pages of the KV cache, written before they are needed, while nothing is computed.

The system gives a page of memory when it is first written, which would keep a prompt waiting. Not
all pages are written at the start: that takes seconds, and memory that most servers never need.
"""

import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# From linux/mman.h; Linux 5.14 is the first that has it. What was written stays as it is.
_POPULATE_WRITE = 23
_PAGE_BYTES = 4096
# So much beyond the highest block in use is brought there.
_AHEAD_BYTES = 512 * 2**20
# So much goes from one end of the blocks on at a time, in all parts; whether somebody computes is
# asked before each part.
_PIECE_BYTES = 2**20
# Consecutive idle polls before a piece is written, and seconds between two.
_IDLE_POLLS = 3
_POLL_S = 0.04


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


class Passes:
    """Knows whether anything is computed: `with` it around each pass, ask from any thread."""

    def __init__(self) -> None:
        self._num_begun = self._num_ended = self._num_seen = 0

    def __enter__(self) -> None:
        self._num_begun += 1

    def __exit__(self, *error: object) -> None:
        self._num_ended += 1

    def are_computed(self) -> bool:
        """Whether a pass is under way, or has begun since this was last asked."""
        begun, seen = self._num_begun, self._num_seen
        self._num_seen = begun
        return begun != self._num_ended or begun != seen


class FirstTouch:
    """Owns the knowledge of how much of a cache is there. `run` is the body of a thread; the other
    methods are called from the thread that computes."""

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        """`is_busy`: whether anything is being computed; asked from the thread."""
        self._is_busy = is_busy
        # Held while pages are written, so that no cache goes away meanwhile.
        self._lock = threading.Lock()
        self._has_work = threading.Event()
        self._memory: Tensor | None = None
        self._parts: Parts | None = None
        # Blocks that are there, and that should be.
        self._num_there = 0
        self._num_wanted = 0

    def allocate(self, count: int, num_blocks: int, block_bytes: int, num_first: int = 0) -> Tensor:
        """Memory for a cache, zeros in uint8, see `Parts`; the former one may go. The pages of the
        first blocks are written at once, those of the others when there is time."""
        with self._lock:
            self._memory = self._parts = None
            self._num_there = self._num_wanted = 0
            self._memory = memory = untouched(count * num_blocks * block_bytes)
            self._parts = parts = Parts(memory.data_ptr(), count, num_blocks, block_bytes)
        # Where the system can not, pages come when they are written, as ever.
        with suppress(OSError):
            for region in parts.regions(0, min(num_first, num_blocks)):
                bring(*region)
        self.note_use(0)
        return memory

    def note_use(self, num_blocks: int) -> None:
        """The first `num_blocks` blocks are in use, or have been."""
        if (parts := self._parts) is None:
            return
        ahead = _AHEAD_BYTES // (parts.count * parts.block_bytes)
        wanted = min(parts.num_blocks, num_blocks + ahead)
        # Some at once, so that the thread is not woken by every request; the last ones in any case.
        least = 1 if wanted == parts.num_blocks else 1 + ahead // 8
        if wanted >= self._num_wanted + least:
            self._num_wanted = wanted
            self._has_work.set()

    def run(self) -> None:
        """Bring pages whenever some are missing and nothing is computed; never returns, unless the
        system does not know how."""
        try:
            while self._has_work.wait():
                self._has_work.clear()
                self.catch_up()
        except OSError as error:
            logger.info("the pages of the KV cache are not written beforehand: %s", error)

    def catch_up(self) -> None:
        """Bring what is missing now. OSError: the system does not."""
        while (parts := self._parts) is not None and self._num_there < self._num_wanted:
            count = max(1, _PIECE_BYTES // (parts.count * parts.block_bytes))
            last = min(self._num_there + count, parts.num_blocks)
            for region in parts.regions(self._num_there, last):
                self._wait_until_idle()
                with self._lock:
                    if self._parts is not parts:
                        return  # `allocate` has set `_has_work`
                    bring(*region)
            with self._lock:
                if self._parts is parts:
                    self._num_there = last

    def _wait_until_idle(self) -> None:
        idle = 0 if self._is_busy() else _IDLE_POLLS
        while idle < _IDLE_POLLS:
            time.sleep(_POLL_S)
            idle = 0 if self._is_busy() else idle + 1


def untouched(nbytes: int) -> Tensor:
    """`nbytes` of zeros, uint8, that take neither memory nor time until they are written."""
    # Private, because the system gives shared pages more slowly.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


def bring(address: int, size: int) -> None:
    """Have the system give the pages there, so many bytes from a page's address on. OSError: it
    does not."""
    advise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if advise is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if advise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
