"""A thread pool that computes the phases of a pass.

Why it is fast: a pass of few tokens has hundreds of very short phases, so transitions must be
short. A phase begins when the last item of the previous one is done, without the cost of a parallel
loop. An idle thread prefetches the weights that it will read next. The pool rarely waits for a
thread that the system has stopped: other threads take its items, including the one in progress if
that has few rows (unless the thread stopped while taking an item or storing results).

A phase has items, which threads may compute in any order. Each thread begins with its own share,
contiguous in memory, then steals from other shares (Blumofe and Leiserson 1999). Any number of
threads may arrive; a single one computes everything.

One kernel for all its items (`compute`) has no use for phases, and is a parallel loop.
"""

from functools import cache
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numba import boolean, from_dtype, int64, njit, prange

from text_generation_shard.device.cpu.kernels import Address, Count, llvm, struct_type
from text_generation_shard.device.cpu.kernels.vector import ADDRESS

PHASE: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("step", "layer", "first", "items", "weights", "item_bytes", "is_short"),
            *("word", "begin", "end"),
        )
    ]
)
"""A phase: step, layer, and first row; number of items, possibly 0; address of the weights that the
items read in order, and bytes per item (0: none); whether an item calls `may_store` before it
stores results, so that two threads may compute it; and for an exchange between ranks the
operation, see `steps`, and its rows."""
PHASES: Final = from_dtype(PHASE)[::1]

# The board: one cache line with a word: the phase in the upper half, and in the lower half whether
# the next one is being opened. Then one line for each thread: next item of its share, and number of
# items done, both with the phase in the upper half; and the item in progress.
_LINE: Final = 64
_DONE: Final = 8
_HELD: Final = 16
# The item in progress: phase, item, and which thread stores its results: none yet, the owner, or
# another one.
_PHASE_BITS: Final = 34
_NO_THREAD: Final = 1
_OWNER: Final = 2
_OTHER: Final = 3
_LOWER: Final = 0xFFFFFFFF

# Bytes of its next share that an idle thread prefetches; a part of the second-level cache.
_AHEAD_BYTES: Final = 96 * 1024
_LINES_AT_ONCE: Final = 8
# Least polls of the board before an item is taken over; polls before the core is yielded.
_FEWEST_LOOKS: Final = 64
_MOST_LOOKS: Final = 2000


def board_words(num_threads: int) -> int:
    """Number of int64 of a board, which must be 64-byte aligned."""
    return (1 + num_threads) * _LINE // 8


class Work(NamedTuple):
    """The work of the pool. If two threads may compute an item, the items must not write what their
    phase reads."""

    # Address of a function, see `llvm.call`, that computes an item: (given, phases, index of the
    # phase, item, ticket for `may_store`).
    code: Address
    given: Any
    phases: Annotated[Any, PHASES]
    board: Address
    # Most threads; fewer may arrive.
    num_threads: Count


@njit(parallel=True, nogil=True, boundscheck=False, error_model="numpy")
def run_phases(code: int, given: Any, phases: Any, board: int, num_threads: int) -> None:
    """Compute all phases with up to `num_threads` threads, including the caller; see `Work`, which
    is built here because numba passes no nested tuples to threads."""
    begin(Work(code, given, phases, board, num_threads))
    for thread in prange(num_threads):
        run_thread(Work(code, given, phases, board, num_threads), np.int64(thread))


@njit(nogil=True)
def begin(work: Work) -> None:
    """Initialize the board."""
    for thread in range(work.num_threads):
        llvm.store_word(_line(work, thread) + _DONE, 0)
        llvm.store_word(_line(work, thread) + _HELD, 0)
    _open(work, 0)


@njit(nogil=True, boundscheck=False, error_model="numpy")
def run_thread(work: Work, me: int) -> None:
    """The loop of a thread, until all phases are done."""
    ticket = llvm.scratch(1)
    phase = llvm.load_word(work.board) >> 32
    while phase < len(work.phases):
        _take_items(work, phase, me, ticket)
        _close(work, phase)
        _fetch_share(work, phase, me)
        # A poll of the board takes longer than reading a line of memory.
        looks = min(max(_FEWEST_LOOKS, work.phases[phase].item_bytes // _LINE), _MOST_LOOKS)
        looked = 0
        while not _is_over(work, phase, looks):
            _take_over(work, phase, me, ticket)
            _close(work, phase)
            looked += looks
            if looked >= _MOST_LOOKS:
                llvm.yield_core()
                looked = 0
        phase = llvm.load_word(work.board) >> 32


@njit(inline="always")
def _line(work: Work, thread: int) -> int:
    """Address of a thread's line of the board."""
    return work.board + (1 + thread) * _LINE


@njit(inline="always")
def may_store(ticket: int) -> Any:
    """Whether this thread stores the results of its item. Call it exactly once per item."""
    words = llvm.array_at(ADDRESS, ticket)
    is_mine = words[0] == 0 or llvm.compare_exchange(words[0], words[1], words[2])
    words[3] = is_mine
    return is_mine


@njit(inline="always")
def _open(work: Work, phase: int) -> None:
    """Open a phase, or the next one with items."""
    while phase < len(work.phases) and work.phases[phase].items == 0:
        phase += 1
    if phase < len(work.phases):
        for thread in range(work.num_threads):
            start = thread * work.phases[phase].items // work.num_threads
            llvm.store_word(_line(work, thread), (phase << 32) + start)
    llvm.store_word(work.board, phase << 32)


@njit(inline="always")
def _close(work: Work, phase: int) -> None:
    """Open the next phase, if all items of this one are done and no other thread has opened it."""
    # If two threads finish at the same time, at least one sees the other's count.
    llvm.fence()
    count = 0
    for thread in range(work.num_threads):
        done = llvm.load_word(_line(work, thread) + _DONE)
        if done >> 32 == phase:
            count += done & _LOWER
    if count == work.phases[phase].items and llvm.compare_exchange(
        work.board, phase << 32, (phase << 32) + 1
    ):
        _open(work, phase + 1)


@njit(inline="always")
def _count_item(work: Work, phase: int, me: int) -> None:
    """Count an item as done, immediately, because the thread may be stopped in the next one."""
    at = _line(work, me) + _DONE
    done = llvm.load_word(at)
    llvm.store_word(at, done + 1 if done >> 32 == phase else (phase << 32) + 1)


@njit(inline="always")
def _take_items(work: Work, phase: int, me: int, ticket: int) -> None:
    """Take and compute items until none is left."""
    is_short, held = work.phases[phase].is_short, _line(work, me) + _HELD
    words = llvm.array_at(ADDRESS, ticket)
    words[0], words[3] = held if is_short else 0, 1
    for offset in range(work.num_threads):
        owner = (me + offset) % work.num_threads
        end = (owner + 1) * work.phases[phase].items // work.num_threads
        share = _line(work, owner)
        while True:
            item = _take(share, phase, end)
            if item < 0:
                break
            if is_short:
                at = (phase << _PHASE_BITS) + (item << 2)
                words[1], words[2] = at + _NO_THREAD, at + _OWNER
                llvm.store_word(held, at + _NO_THREAD)
            llvm.call(work.code, (work.given, work.phases, phase, item, ticket))
            if words[3]:
                _count_item(work, phase, me)


@njit(inline="always")
def _take(share: int, phase: int, end: int) -> Any:
    """Take the next item of a share; negative: none is left, or the phase is over."""
    while True:
        now = llvm.load_word(share)
        item = now & _LOWER
        if now >> 32 != phase or item >= end:
            return np.int64(-1)
        if llvm.compare_exchange(share, now, now + 1):
            return item


@njit(inline="always")
def _take_over(work: Work, phase: int, me: int, ticket: int) -> None:
    """Compute the items that other threads have in progress for too long."""
    if not work.phases[phase].is_short:
        return
    words = llvm.array_at(ADDRESS, ticket)
    for offset in range(1, work.num_threads):
        held = _line(work, (me + offset) % work.num_threads) + _HELD
        at = llvm.load_word(held)
        if at >> _PHASE_BITS == phase and at & 3 == _NO_THREAD:
            words[0], words[1], words[2] = held, at, at - _NO_THREAD + _OTHER
            llvm.call(work.code, (work.given, work.phases, phase, (at >> 2) & _LOWER, ticket))
            if words[3]:
                _count_item(work, phase, me)


@njit(inline="always")
def _fetch_share(work: Work, phase: int, me: int) -> None:
    """Until the phase is over, prefetch this thread's share of the next phase with weights."""
    following = phase + 1
    while following < len(work.phases) and work.phases[following].weights == 0:
        following += 1
    if following == len(work.phases):
        return
    items, size = work.phases[following].items, work.phases[following].item_bytes
    at = work.phases[following].weights + me * items // work.num_threads * size
    share = work.phases[following].weights + (me + 1) * items // work.num_threads * size
    end = min(at + _AHEAD_BYTES, share)
    while at < end and llvm.load_word(work.board) >> 32 == phase:
        for line in range(_LINES_AT_ONCE):
            llvm.fetch(at + line * _LINE)
        at += _LINES_AT_ONCE * _LINE


@njit(inline="always")
def _is_over(work: Work, phase: int, looks: int) -> bool:
    """Poll the board; whether the phase has ended."""
    for _ in range(looks):
        if llvm.load_word(work.board) >> 32 != phase:
            return True
        llvm.pause()
    return False


def item_signature(struct: type, kind: Any) -> tuple[Any, ...]:
    """Signature of a kernel (given, index of an item), whose `given` is a struct; its field `kind`
    is a marker of this type, see `vector`."""
    return struct_type(struct, kind=kind), int64


def all_signature(given: Any) -> tuple[Any, ...]:
    """Signature of `compute_all` for a struct of this type."""
    return int64, given, int64, boolean


def compute(kernel: Any, given: Any, count: int, is_shared: bool) -> None:
    """Compute `count` items of one kernel; is_shared: in several threads, which cost something to
    start."""
    struct: Any = type(given)
    compute_all(_code(kernel, struct, given.kind.dtype), given, count, is_shared)


@cache
def _code(kernel: Any, struct: Any, dtype: Any) -> int:
    return llvm.address_of(kernel, item_signature(struct, from_dtype(dtype)))


@njit(parallel=True, nogil=True, cache=True, boundscheck=False, error_model="numpy")
def compute_all(code: int, given: Any, count: int, is_shared: bool) -> None:
    """`compute` with the address of the kernel, see `llvm.call`."""
    if is_shared:
        for index in prange(count):
            llvm.call(code, (given, np.int64(index)))
    else:
        for index in range(count):
            llvm.call(code, (given, np.int64(index)))
