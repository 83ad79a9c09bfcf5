"""What of a weight in 12 bits has no code is added in bfloat16, behind all else: see `bfloat12`."""

from typing import Any

from numba import njit, types
from numba.extending import intrinsic

from text_generation_shard.device.cpu.kernels.llvm import (
    FLOATS,
    INT32,
    INTS,
    VECTOR_BYTES,
    broadcast,
    load,
)
from text_generation_shard.device.cpu.kernels.product import SUMS_BYTES
from text_generation_shard.device.cpu.kernels.tile import add_pairs
from text_generation_shard.device.cpu.kernels.vector import ADDRESS, STEP_BYTES, array_at


@njit(nogil=True, boundscheck=False, error_model="numpy")
def add_exceptions(
    beside: int, panels: Any, inputs: int, row_bytes: int, rows: int, sums: int
) -> None:
    """Sums of some rows grow by the exceptions of some panels. beside: the address of what a
    `narrow.Narrowed` has beside it. panels: the first, how many, and of how many at all. inputs:
    the address of the rows."""
    first, count, all_panels = panels
    firsts_at = beside + all_panels * VECTOR_BYTES
    firsts = array_at(ADDRESS, firsts_at)
    if firsts[first] == firsts[first + count]:
        return
    steps_at = firsts_at + (all_panels + 1) * 8
    steps, end = array_at(ADDRESS, steps_at), steps_at + firsts[all_panels] * 8
    vectors = -(-end // VECTOR_BYTES) * VECTOR_BYTES
    for column in range(count):
        for place in range(firsts[first + column], firsts[first + column + 1]):
            source, to = inputs + steps[place] * STEP_BYTES, sums + column * VECTOR_BYTES
            for row in range(rows):
                vector = vectors + place * VECTOR_BYTES
                _add_step(vector, source + row * row_bytes, to + row * SUMS_BYTES)


@intrinsic
def _add_step(typingctx: Any, vector: Any, inputs: Any, sums: Any) -> Any:
    """16 sums grow by the products of a step: all arguments are addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector, inputs, sums = arguments
        value = broadcast(builder, load(builder, inputs, INT32, 4))
        total = load(builder, sums, FLOATS, 4)
        total = add_pairs(builder, total, load(builder, vector, INTS, VECTOR_BYTES), value)
        builder.store(total, builder.inttoptr(sums, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3), generate
