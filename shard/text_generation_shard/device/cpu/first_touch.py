"""Populates pages of the KV cache in advance, while nothing is computed.

The system allocates a page at its first write, which would delay a prompt. Populating all pages at
the start would take long, and memory that most servers never need.
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

# MADV_POPULATE_WRITE of linux/mman.h, since Linux 5.14. It keeps the contents of written pages.
_POPULATE_WRITE = 23
_PAGE_BYTES = 4096
# Bytes populated beyond the highest block in use.
_AHEAD_BYTES = 512 * 2**20
# Bytes populated at a time, over all parts; before each part the thread waits until nothing is
# computed.
_PIECE_BYTES = 2**20
# Consecutive idle polls required before a piece is populated, and seconds between polls.
_IDLE_POLLS = 3
_POLL_S = 0.04


@dataclass(frozen=True, slots=True)
class Parts:
    """Memory of `count` consecutive parts, each with `num_blocks` consecutive blocks of
    `block_bytes`."""

    address: int
    count: int
    num_blocks: int
    block_bytes: int

    def regions(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Address and size of the pages of blocks [first, last) in each part. `address` must be
        page-aligned."""
        for part in range(self.count):
            start = part * self.num_blocks * self.block_bytes
            begin = (start + first * self.block_bytes) // _PAGE_BYTES * _PAGE_BYTES
            end = -(-(start + last * self.block_bytes) // _PAGE_BYTES) * _PAGE_BYTES
            yield self.address + begin, end - begin


class Passes:
    """Tracks whether a pass is computed. A context manager around each pass; any thread may query
    it."""

    def __init__(self) -> None:
        self._num_begun = self._num_ended = self._num_seen = 0

    def __enter__(self) -> None:
        self._num_begun += 1

    def __exit__(self, *error: object) -> None:
        self._num_ended += 1

    def are_computed(self) -> bool:
        """Whether a pass is in progress, or has begun since the last call."""
        begun, seen = self._num_begun, self._num_seen
        self._num_seen = begun
        return begun != self._num_ended or begun != seen


class FirstTouch:
    """Owns the state of which pages of a cache are populated. `run` is the body of a background
    thread; the device thread calls the other methods."""

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        """`is_busy`: whether a pass is computed; called by the background thread."""
        self._is_busy = is_busy
        # Held while pages are populated, so that the cache is not freed meanwhile.
        self._lock = threading.Lock()
        self._has_work = threading.Event()
        self._memory: Tensor | None = None
        self._parts: Parts | None = None
        # Blocks that are populated, and that should be.
        self._num_there = 0
        self._num_wanted = 0

    def allocate(self, count: int, num_blocks: int, block_bytes: int, num_first: int = 0) -> Tensor:
        """Allocate zeros in uint8 for a cache, see `Parts`, and drop the previous one. Pages of the
        first `num_first` blocks are populated now, the others in the background."""
        with self._lock:
            self._memory = self._parts = None
            self._num_there = self._num_wanted = 0
            self._memory = memory = unwritten_zeros(count * num_blocks * block_bytes)
            self._parts = parts = Parts(memory.data_ptr(), count, num_blocks, block_bytes)
        # Without this system call, pages are allocated at their first write.
        with suppress(OSError):
            for region in parts.regions(0, min(num_first, num_blocks)):
                populate(*region)
        self.note_use(0)
        return memory

    def note_use(self, num_blocks: int) -> None:
        """Report that the first `num_blocks` blocks are or were in use."""
        if (parts := self._parts) is None:
            return
        ahead = _AHEAD_BYTES // (parts.count * parts.block_bytes)
        wanted = min(parts.num_blocks, num_blocks + ahead)
        # A minimum step, so that not every request wakes the thread; the last blocks are always
        # populated.
        least = 1 if wanted == parts.num_blocks else 1 + ahead // 8
        if wanted >= self._num_wanted + least:
            self._num_wanted = wanted
            self._has_work.set()

    def run(self) -> None:
        """Populate missing pages whenever nothing is computed. Returns only if the system does not
        support it."""
        try:
            while self._has_work.wait():
                self._has_work.clear()
                self.catch_up()
        except OSError as error:
            logger.info("KV cache pages are not populated in advance: %s", error)

    def catch_up(self) -> None:
        """Populate all missing pages. Raises OSError if the system does not support it."""
        while (parts := self._parts) is not None and self._num_there < self._num_wanted:
            count = max(1, _PIECE_BYTES // (parts.count * parts.block_bytes))
            last = min(self._num_there + count, parts.num_blocks)
            for region in parts.regions(self._num_there, last):
                self._wait_until_idle()
                with self._lock:
                    if self._parts is not parts:
                        return  # `allocate` has set `_has_work`
                    populate(*region)
            with self._lock:
                if self._parts is parts:
                    self._num_there = last

    def _wait_until_idle(self) -> None:
        idle = 0 if self._is_busy() else _IDLE_POLLS
        while idle < _IDLE_POLLS:
            time.sleep(_POLL_S)
            idle = 0 if self._is_busy() else idle + 1


def unwritten_zeros(nbytes: int) -> Tensor:
    """`nbytes` zeros in uint8, which take no memory until they are written."""
    # Private, because shared pages are allocated more slowly.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


def populate(address: int, size: int) -> None:
    """Populate the pages of `size` bytes from the page-aligned `address`. Raises OSError if the
    system does not support it."""
    advise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if advise is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if advise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
