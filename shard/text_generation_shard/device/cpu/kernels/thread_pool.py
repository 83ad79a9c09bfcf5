"""Threads that go through the phases of a pass together.

Why it is fast: a pass of few tokens is three hundred phases of some twenty microseconds, and all
that lies between them is lost. Here a phase begins when the last item of the one before is done,
which costs a few hundred nanoseconds, not the microseconds of a loop in threads; who has nothing to
do brings into its cache what it will read next; and a thread that the system has stopped is seldom
waited for: its part is taken by others, down to the item it was at, where that is one of few rows
(and it was not just about to take or to put something).

A phase has items, which any thread may compute in any order. Each thread begins with a share of its
own, one behind the other in memory, and then takes from the others'. How many threads really come
does not matter: one alone does everything. (Blumofe and Leiserson 1999 on taking from others.)
"""

from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numba import from_dtype, njit, prange

from text_generation_shard.device.cpu.kernels import llvm
from text_generation_shard.device.cpu.kernels.structs import Address, Count
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
"""A phase: what is done, in which layer, from which row on; in how many items, none or more; where
the weights lie that these read one after another, and the bytes of each (0: none); whether an item
asks `may_put` before it puts its results anywhere, so that two threads may compute it; and of what
several ranks do together the operation, see `rank_steps`, and its rows."""
PHASES: Final = from_dtype(PHASE)[::1]

# The board: a cache line with the number of the phase in the upper half of a word, and whether the
# next is being opened in the lower; and one for each thread: the next item of its share, how many
# items it has done, both likewise with their phase, and the item that it is at.
_LINE: Final = 64
_DONE: Final = 8
_HELD: Final = 16
# The item a thread is at: phase, item, and who puts its results: nobody yet, or somebody.
_PHASE_BITS: Final = 34
_NOBODY: Final = 1
_OWNER: Final = 2
_OTHER: Final = 3
_LOWER: Final = 0xFFFFFFFF

# Of its next share, what a waiting thread fetches: a part of the second-level cache.
_AHEAD_BYTES: Final = 96 * 1024
_LINES_AT_ONCE: Final = 8
# Looks at the board before an item is taken over, at least, and until others are offered the core.
_FEWEST_LOOKS: Final = 64
_MOST_LOOKS: Final = 2000


def board_words(num_threads: int) -> int:
    """How many int64 a board needs; it begins at a multiple of 64 bytes."""
    return (1 + num_threads) * _LINE // 8


class Work(NamedTuple):
    """What threads do together. Nothing that a phase reads may be written by its items if two
    threads may compute one of them."""

    # Where a function lies, see `llvm.call`, that computes an item: of (given, the phases, the
    # index of one, the item, a ticket for `may_put`).
    code: Address
    given: Any
    phases: Annotated[Any, PHASES]
    board: Address
    # At most; fewer may come.
    num_threads: Count


@njit(parallel=True, nogil=True, boundscheck=False, error_model="numpy")
def go_through(code: int, given: Any, phases: Any, board: int, num_threads: int) -> None:
    """Have all phases done by up to so many threads, the calling one among them; see `Work`, which
    is made here because numba hands no tuple within a tuple to threads."""
    begin(Work(code, given, phases, board, num_threads))
    for thread in prange(num_threads):
        take_part(Work(code, given, phases, board, num_threads), np.int64(thread))


@njit(nogil=True)
def begin(work: Work) -> None:
    """Before the first thread comes."""
    for thread in range(work.num_threads):
        llvm.put_word(_line(work, thread) + _DONE, 0)
        llvm.put_word(_line(work, thread) + _HELD, 0)
    _open(work, 0)


@njit(nogil=True, boundscheck=False, error_model="numpy")
def take_part(work: Work, me: int) -> None:
    """What a thread does until all is done."""
    ticket = llvm.scratch(1)
    phase = llvm.get_word(work.board) >> 32
    while phase < len(work.phases):
        _take_items(work, phase, me, ticket)
        _close(work, phase)
        _fetch_share(work, phase, me)
        # To look at the board takes longer than to read a line of memory.
        looks = min(max(_FEWEST_LOOKS, work.phases[phase].item_bytes // _LINE), _MOST_LOOKS)
        looked = 0
        while not _is_over(work, phase, looks):
            _take_over(work, phase, me, ticket)
            _close(work, phase)
            looked += looks
            if looked >= _MOST_LOOKS:
                llvm.give_way()
                looked = 0
        phase = llvm.get_word(work.board) >> 32


@njit(inline="always")
def _line(work: Work, thread: int) -> int:
    """Of the board, a thread's own cache line."""
    return work.board + (1 + thread) * _LINE


@njit(inline="always")
def may_put(ticket: int) -> Any:
    """Whether it is this thread that puts the results of an item. Asked once."""
    words = llvm.array_at(ADDRESS, ticket)
    is_mine = words[0] == 0 or llvm.exchange_word(words[0], words[1], words[2])
    words[3] = is_mine
    return is_mine


@njit(inline="always")
def _open(work: Work, phase: int) -> None:
    """Open a phase, or the next one that has items."""
    while phase < len(work.phases) and work.phases[phase].items == 0:
        phase += 1
    if phase < len(work.phases):
        for thread in range(work.num_threads):
            start = thread * work.phases[phase].items // work.num_threads
            llvm.put_word(_line(work, thread), (phase << 32) + start)
    llvm.put_word(work.board, phase << 32)


@njit(inline="always")
def _close(work: Work, phase: int) -> None:
    """Open the next phase if all is done in this one and nobody else has."""
    # Of two threads that finish at once, one sees what the other has done.
    llvm.fence()
    count = 0
    for thread in range(work.num_threads):
        done = llvm.get_word(_line(work, thread) + _DONE)
        if done >> 32 == phase:
            count += done & _LOWER
    if count == work.phases[phase].items and llvm.exchange_word(
        work.board, phase << 32, (phase << 32) + 1
    ):
        _open(work, phase + 1)


@njit(inline="always")
def _note(work: Work, phase: int, me: int) -> None:
    """An item is done. Noted at once: a thread may be stopped at the next."""
    at = _line(work, me) + _DONE
    done = llvm.get_word(at)
    llvm.put_word(at, done + 1 if done >> 32 == phase else (phase << 32) + 1)


@njit(inline="always")
def _take_items(work: Work, phase: int, me: int, ticket: int) -> None:
    """Compute items until none is left to be taken."""
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
                words[1], words[2] = at + _NOBODY, at + _OWNER
                llvm.put_word(held, at + _NOBODY)
            llvm.call(work.code, (work.given, work.phases, phase, item, ticket))
            if words[3]:
                _note(work, phase, me)


@njit(inline="always")
def _take(share: int, phase: int, end: int) -> Any:
    """The next item of a share; negative: there is none, or the phase is over."""
    while True:
        now = llvm.get_word(share)
        item = now & _LOWER
        if now >> 32 != phase or item >= end:
            return np.int64(-1)
        if llvm.exchange_word(share, now, now + 1):
            return item


@njit(inline="always")
def _take_over(work: Work, phase: int, me: int, ticket: int) -> None:
    """Compute what others have been at for too long."""
    if not work.phases[phase].is_short:
        return
    words = llvm.array_at(ADDRESS, ticket)
    for offset in range(1, work.num_threads):
        held = _line(work, (me + offset) % work.num_threads) + _HELD
        at = llvm.get_word(held)
        if at >> _PHASE_BITS == phase and at & 3 == _NOBODY:
            words[0], words[1], words[2] = held, at, at - _NOBODY + _OTHER
            llvm.call(work.code, (work.given, work.phases, phase, (at >> 2) & _LOWER, ticket))
            if words[3]:
                _note(work, phase, me)


@njit(inline="always")
def _fetch_share(work: Work, phase: int, me: int) -> None:
    """Until the phase is over, fetch what this thread will read in the next one with weights."""
    following = phase + 1
    while following < len(work.phases) and work.phases[following].weights == 0:
        following += 1
    if following == len(work.phases):
        return
    items, size = work.phases[following].items, work.phases[following].item_bytes
    at = work.phases[following].weights + me * items // work.num_threads * size
    share = work.phases[following].weights + (me + 1) * items // work.num_threads * size
    end = min(at + _AHEAD_BYTES, share)
    while at < end and llvm.get_word(work.board) >> 32 == phase:
        for line in range(_LINES_AT_ONCE):
            llvm.fetch(at + line * _LINE)
        at += _LINES_AT_ONCE * _LINE


@njit(inline="always")
def _is_over(work: Work, phase: int, looks: int) -> bool:
    """Whether a phase ends while the board is looked at so often."""
    for _ in range(looks):
        if llvm.get_word(work.board) >> 32 != phase:
            return True
        llvm.pause()
    return False
