"""Time in compiled code: a clock, sleep, and an atomic sum."""

from typing import Any, Final

from numba import types

from text_generation_shard.device.cpu.kernels.llvm import (
    INT32,
    INT64,
    call_llvm,
    instruction,
    pointer_to,
)

# CLOCK_MONOTONIC of Linux.
_MONOTONIC: Final = 1


@instruction(types.int64)
def now_ns(builder: Any, kinds: Any) -> Any:
    """Monotonic time in nanoseconds, as time.monotonic_ns()."""
    with builder.goto_entry_block():
        times = builder.alloca(INT64, size=INT32(2))
    call_llvm(builder, "clock_gettime", INT32, INT32(_MONOTONIC), times)
    seconds = builder.load(times)
    rest = builder.load(builder.gep(times, [INT32(1)]))
    return builder.add(builder.mul(seconds, INT64(10**9)), rest)


@instruction(types.void)
def sleep(builder: Any, kinds: Any, microseconds: Any) -> None:
    """Sleep for at least this number of microseconds."""
    call_llvm(builder, "usleep", INT32, builder.trunc(microseconds, INT32))


@instruction(types.void)
def add_to_word(builder: Any, kinds: Any, address: Any, value: Any) -> None:
    """Atomically add to the word at an address."""
    builder.atomic_rmw("add", pointer_to(builder, address, INT64), value, "monotonic")
