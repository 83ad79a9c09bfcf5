"""What ranks tell each other through memory that their processes share, in compiled code.

The memory has, after `HEAD_BYTES`, two cache lines for each rank (`BYTES_OF_RANK`), and behind all
of those two slots for each rank. Of a rank's lines the first holds its word: the operation whose
part it has put last. The second holds messages that it has given up.

An operation's word is its message's number and, in the lowest `COUNT_BITS`, which operation of the
message it is: 0 is only that a rank has begun the message, and no rank puts anything for a message
before all have. Each rank puts its part into its slot for that operation (`slot`: odd and even ones
take turns), then its word (`publish`); then it may read the others' slots, each after `await_rank`.
So a slot is written again when all ranks have put their words of the operation after it, and with
them say that they have read it.
"""

from typing import Any, Final

import numpy as np
from numba import from_dtype, njit

from text_generation_shard.device.cpu.kernels import clock, llvm

COUNT_BITS: Final = 24
"""Of an operation's word, those that count within a message."""

FIELDS: Final = {
    "lines": "address: of rank 0's lines; 64-byte aligned, as `slots`",
    "slots": "address: of rank 0's first slot",
    "slot_bytes": "of a slot, a multiple of 64",
    "rank": "of this process",
    "size": "how many ranks there are",
    "deadline_ns": "how long one is waited for",
    "stop": "address: of this process's own word; not 0: nobody is waited for any longer",
    "waited": "address: of this process's own word, to which nanoseconds are added that threads "
    "waited",
}
EXCHANGE: Final = np.dtype([(name, np.int64) for name in FIELDS])
"""What a rank knows of the memory; it does not change."""
EXCHANGES: Final = from_dtype(EXCHANGE)[::1]

ARRIVED: Final = 0
GAVE_UP: Final = 1
LATE: Final = 2
STOPPED: Final = 3
"""How waiting ended, in the lowest two bits of a status; above them is the rank that was waited
for."""

HEAD_BYTES: Final = 64
LINE: Final = 64
BYTES_OF_RANK: Final = 2 * LINE
# Of messages that a rank has given up, each lies where its number says.
_PLACES: Final = 8
# Looks at a word between two at all else, and nanoseconds after which a core is left to others,
# each time for some microseconds: who waits so long does not wait for a part of the same step.
_LOOKS: Final = 1000
_LONG_NS: Final = 2_000_000
_NAP_US: Final = 50


@njit(inline="always")
def slot(exchange: Any, rank: Any, word: Any) -> Any:
    """The address of a rank's slot for an operation."""
    return exchange.slots + (2 * rank + (word & 1)) * exchange.slot_bytes


@njit(inline="always")
def publish(exchange: Any, word: Any) -> None:
    """This rank's part of an operation is in its slot: all that this thread wrote, and all that
    others wrote and it knows of."""
    llvm.put_word(_line(exchange, exchange.rank), word)


@njit(inline="always")
def give_up(exchange: Any, number: Any) -> None:
    """This rank computes nothing more of a message."""
    # Of memory that nobody has written yet no message was given up.
    llvm.put_word(_given_up(exchange, exchange.rank, number), number + 1)


@njit(nogil=True, boundscheck=False, error_model="numpy")
def await_rank(exchange: Any, rank: int, word: int) -> Any:
    """Wait until a rank's part of an operation is in its slot; a status: ARRIVED, which is 0, or
    why it will not be there. Any threads may wait at once, for the same or for different ones."""
    line = _line(exchange, rank)
    if llvm.get_word(line) >= word:
        return _arrived(exchange, rank, word)
    began = now = clock.now_ns()
    status = -1
    while status < 0:
        if _is_there(line, word):
            status = _arrived(exchange, rank, word)
        elif _has_given_up(exchange, rank, word):
            status = GAVE_UP + 4 * rank
        elif llvm.get_word(exchange.stop) != 0:
            status = STOPPED + 4 * rank
        elif now - began > exchange.deadline_ns:
            status = LATE + 4 * rank
        elif now - began > _LONG_NS:
            clock.sleep(np.int64(_NAP_US))
        else:
            llvm.give_way()
        now = clock.now_ns()
    clock.add_to_word(exchange.waited, now - began)
    return status


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def exchange_word(exchange: Any, word: int) -> Any:
    """`publish`, and `await_rank` of all; the first status that is not ARRIVED. exchange: of one
    element."""
    publish(exchange[0], word)
    for rank in range(exchange[0].size):
        status = await_rank(exchange[0], rank, word)
        if status != ARRIVED:
            return status
    return ARRIVED


@njit(nogil=True, cache=True)
def give_up_message(exchange: Any, number: int) -> None:
    """`give_up`; exchange: of one element."""
    give_up(exchange[0], number)


@njit(inline="always")
def _line(exchange: Any, rank: Any) -> Any:
    return exchange.lines + rank * BYTES_OF_RANK


@njit(inline="always")
def _given_up(exchange: Any, rank: Any, number: Any) -> Any:
    """Where a rank notes that it has given up a message. What is noted is overwritten a few
    messages later: those are not begun before the others' answers to this one are known."""
    return _line(exchange, rank) + LINE + number % _PLACES * 8


@njit(inline="always")
def _has_given_up(exchange: Any, rank: Any, word: Any) -> Any:
    number = word >> COUNT_BITS
    return llvm.get_word(_given_up(exchange, rank, number)) == number + 1


@njit(inline="always")
def _arrived(exchange: Any, rank: Any, word: Any) -> Any:
    """The status when a rank's word is this one, or a later one, as after a message that it gave
    up."""
    is_in_message = llvm.get_word(_line(exchange, rank)) >> COUNT_BITS == word >> COUNT_BITS
    if is_in_message or not _has_given_up(exchange, rank, word):
        return ARRIVED
    return GAVE_UP + 4 * rank


@njit(inline="always")
def _is_there(line: Any, word: Any) -> bool:
    """Whether a rank's word comes while it is looked at for some microseconds."""
    for _ in range(_LOOKS):
        if llvm.get_word(line) >= word:
            return True
        llvm.pause()
    return False
