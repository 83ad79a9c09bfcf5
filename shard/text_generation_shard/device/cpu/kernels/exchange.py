"""Exchange between ranks through shared memory, in compiled code.

After `HEAD_BYTES`, the memory has two cache lines for each rank (`BYTES_OF_RANK`), then two slots
for each rank. A rank's first line holds its word: the last operation whose part it has published.
The second line holds the messages that it has aborted.

The word of an operation is its message's number and, in the lowest `COUNT_BITS`, the number of the
operation within the message. Operation 0 only means that the rank has begun the message; no rank
writes a slot for a message before all ranks have begun it. Each rank writes its part to its slot
for that operation (`slot`: even and odd operations alternate), then its word (`publish`). Then it
may read the slots of other ranks, each after `await_rank`. A slot is reused only after all ranks
have published the next operation, and so have read the slot.
"""

from typing import Any, Final

import numpy as np
from numba import from_dtype, njit, types

from text_generation_shard.device.cpu.kernels import llvm
from text_generation_shard.device.cpu.kernels.llvm import INT32, INT64

# CLOCK_MONOTONIC of Linux.
_MONOTONIC: Final = 1


@llvm.instruction(types.int64)
def now_ns(builder: Any, kinds: Any) -> Any:
    """Monotonic time in nanoseconds, as time.monotonic_ns()."""
    with builder.goto_entry_block():
        times = builder.alloca(INT64, size=INT32(2))
    llvm.call_llvm(builder, "clock_gettime", INT32, INT32(_MONOTONIC), times)
    seconds = builder.load(times)
    rest = builder.load(builder.gep(times, [INT32(1)]))
    return builder.add(builder.mul(seconds, INT64(10**9)), rest)


@llvm.instruction(types.void)
def sleep(builder: Any, kinds: Any, microseconds: Any) -> None:
    """Sleep for at least this number of microseconds."""
    llvm.call_llvm(builder, "usleep", INT32, builder.trunc(microseconds, INT32))


COUNT_BITS: Final = 24
"""Bits of a word that number the operations of a message."""

FIELDS: Final = {
    "lines": "address of rank 0's lines; 64-byte aligned, like `slots`",
    "slots": "address of rank 0's first slot",
    "slot_bytes": "bytes of a slot, a multiple of 64",
    "rank": "rank of this process",
    "size": "number of ranks",
    "deadline_ns": "longest wait for a rank",
    "stop": "address of a word of this process; not 0: stop waiting for ranks",
}
EXCHANGE: Final = np.dtype([(name, np.int64) for name in FIELDS])
"""A rank's constants for the exchange."""
EXCHANGES: Final = from_dtype(EXCHANGE)[::1]

ARRIVED: Final = 0
ABORTED: Final = 1
LATE: Final = 2
STOPPED: Final = 3
"""The result of waiting, in the lowest two bits of a status; the higher bits are the awaited
rank."""

HEAD_BYTES: Final = 64
LINE: Final = 64
BYTES_OF_RANK: Final = 2 * LINE
# Entries for aborted messages; a message's number determines its entry.
_PLACES: Final = 8
# Polls of a word between checks of the other conditions; and the nanoseconds after which a waiting
# thread sleeps between polls, because it then does not wait within a step.
_LOOKS: Final = 1000
_LONG_NS: Final = 2_000_000
_NAP_US: Final = 50


@njit(inline="always")
def slot(exchange: Any, rank: Any, word: Any) -> Any:
    """Address of a rank's slot for an operation."""
    return exchange.slots + (2 * rank + (word & 1)) * exchange.slot_bytes


@njit(inline="always")
def publish(exchange: Any, word: Any) -> None:
    """Publish this rank's part of an operation, with release order."""
    llvm.store_word(_line(exchange, exchange.rank), word)


@njit(nogil=True, boundscheck=False, error_model="numpy")
def await_rank(exchange: Any, rank: int, word: int) -> Any:
    """Wait for a rank's part of an operation. Returns a status: ARRIVED (0), or why the part will
    not come. Several threads may wait at the same time."""
    line = _line(exchange, rank)
    if llvm.load_word(line) >= word:
        return _arrived(exchange, rank, word)
    began = now = now_ns()
    status = -1
    while status < 0:
        if _is_there(line, word):
            status = _arrived(exchange, rank, word)
        elif _has_aborted(exchange, rank, word):
            status = ABORTED + 4 * rank
        elif llvm.load_word(exchange.stop) != 0:
            status = STOPPED + 4 * rank
        elif now - began > exchange.deadline_ns:
            status = LATE + 4 * rank
        elif now - began > _LONG_NS:
            sleep(np.int64(_NAP_US))
        else:
            llvm.yield_core()
        now = now_ns()
    return status


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def exchange_word(exchange: Any, word: int) -> Any:
    """`publish`, then `await_rank` for all ranks; returns the first status that is not ARRIVED.
    exchange: [1]."""
    publish(exchange[0], word)
    for rank in range(exchange[0].size):
        status = await_rank(exchange[0], rank, word)
        if status != ARRIVED:
            return status
    return ARRIVED


@njit(nogil=True, cache=True)
def abort_message(exchange: Any, number: int) -> None:
    """Abort a message on this rank. exchange: [1]."""
    own = exchange[0]
    # The number plus 1: in unwritten memory, which is 0, no message is aborted.
    llvm.store_word(_abort_entry(own, own.rank, number), number + 1)


@njit(inline="always")
def _line(exchange: Any, rank: Any) -> Any:
    return exchange.lines + rank * BYTES_OF_RANK


@njit(inline="always")
def _abort_entry(exchange: Any, rank: Any, number: Any) -> Any:
    """Address of a rank's entry for an aborted message. Entries are reused a few messages later;
    those do not begin before all ranks have answered this one."""
    return _line(exchange, rank) + LINE + number % _PLACES * 8


@njit(inline="always")
def _has_aborted(exchange: Any, rank: Any, word: Any) -> Any:
    number = word >> COUNT_BITS
    return llvm.load_word(_abort_entry(exchange, rank, number)) == number + 1


@njit(inline="always")
def _arrived(exchange: Any, rank: Any, word: Any) -> Any:
    """The status if a rank's word is at least `word`. It may be of a later message, if the rank has
    aborted this one."""
    is_in_message = llvm.load_word(_line(exchange, rank)) >> COUNT_BITS == word >> COUNT_BITS
    if is_in_message or not _has_aborted(exchange, rank, word):
        return ARRIVED
    return ABORTED + 4 * rank


@njit(inline="always")
def _is_there(line: Any, word: Any) -> bool:
    """Poll a rank's word for a short time; whether it arrived."""
    for _ in range(_LOOKS):
        if llvm.load_word(line) >= word:
            return True
        llvm.pause()
    return False
