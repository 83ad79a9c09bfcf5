"""What threads tell each other by: words of memory that are read and written whole, in order.

Words are int64 at addresses. What a thread wrote before it put a word is there for whoever gets
that word.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from text_generation_shard.device.cpu.kernels import processor
from text_generation_shard.device.cpu.kernels.llvm import INT32, INT64, call, fetch_line


@intrinsic
def get_word(typingctx: Any, address: Any) -> Any:
    """The word at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_word(builder, arguments[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def put_word(typingctx: Any, address: Any, value: Any) -> Any:
    """Put a word to an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _word(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def exchange_word(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Put a word to an address if it holds what is expected there; whether it did."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = builder.cmpxchg(
            _word(builder, arguments[0]), arguments[1], arguments[2], "acq_rel", "acquire"
        )
        return builder.extract_value(found, 1)

    return types.boolean(*(types.int64,) * 3), generate


@intrinsic
def fence(typingctx: Any) -> Any:
    """What this thread has put is there for others before it gets anything more."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def pause(typingctx: Any) -> Any:
    """Say that this is a loop that waits for a word."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if processor.is_x86():
            call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        elif processor.is_arm():
            # What others wait with there: as long as a pause, where a hint to yield is nothing.
            call(builder, "llvm.aarch64.isb", ir.VoidType(), INT32(15))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def give_way(typingctx: Any) -> Any:
    """Let others have this core first."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        call(builder, "sched_yield", INT32)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def fetch(typingctx: Any, address: Any) -> Any:
    """See `fetch_line`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        fetch_line(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, INT64.as_pointer())
