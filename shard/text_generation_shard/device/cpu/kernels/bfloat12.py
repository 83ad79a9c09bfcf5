"""Weights of bfloat16 in 12 bits, without loss: their exponents take 4 bits instead of 8.

Why it is fast: a decode step is the reading of all weights, and this is three quarters of it. The
exponents of a trained weight carry under 3 bits (Zhang et al. 2025, DFloat11, who write them in
codes of many lengths); of one output's weights nearly all lie among the 15 below its largest. So
codes of one length do, from which a table of 16 makes exponents: two instructions for 32 weights.

Each output's weights are multiplied by a power of two, exactly, so that one table does for all;
sums are multiplied by its inverse. What is smaller than all codes is 0 there, and an exception: a
step that is added behind all others, in bfloat16. The result is that of bfloat16, but for where in
the sum an exception stands.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from text_generation_shard.device.cpu.kernels import vector_code
from text_generation_shard.device.cpu.kernels.llvm import (
    INTS,
    LANES,
    VECTOR_BYTES,
    WORDS,
    Table,
    array_at,
    chosen,
    filled,
    load,
    reinterpreted,
    scratch,
    store,
)
from text_generation_shard.device.cpu.kernels.structs import Address, Count, struct_type
from text_generation_shard.device.cpu.kernels.vector import (
    ADDRESS,
    BFLOAT16,
    aligned,
    inlined,
)
from text_generation_shard.device.cpu.kernels.vector import (
    STEP_BYTES as INPUT_BYTES,
)

STEPS: Final = 4
"""Steps that lie together: a vector of their codes, and two of signs and mantissas, each of two."""
STEP_BYTES: Final = 3 * VECTOR_BYTES // STEPS

_BITS: Final = 4
_NUM_CODES: Final = 2**_BITS
# The exponent that each output's largest weight gets: far enough above 0 for all that an output's
# weights may differ by, and far enough below 255 for sums.
_TOP: Final = 160
# The largest exponent that a weight is taken to have at least: its power of two is a float32.
_LEAST: Final = 40
_INFINITE: Final = 255
# Of a bfloat16.
_SIGN_AND_MANTISSA: Final = 0x807F
_EXPONENT_AT: Final = 7
# Code 0 is the number 0. Of an index into 32 numbers 5 bits count: a code, and one bit of its
# neighbour that may be anything.
_EXPONENTS: Final = [0] + [_TOP - _NUM_CODES + 1 + code for code in range(1, _NUM_CODES)]
_TABLE: Final = Table(WORDS, [number << _EXPONENT_AT for number in _EXPONENTS] * 2)
# int64 to a vector.
_LINE: Final = VECTOR_BYTES // 8


@inlined
def decoded(address: int) -> Any:
    """The four vectors of pairs of bfloat16 that lie at an address."""
    codes, words = load(WORDS, address), load(WORDS, address + VECTOR_BYTES)
    others = load(WORDS, address + 2 * VECTOR_BYTES)
    return (
        _numbers(codes, words),
        _numbers(codes >> _BITS, vector_code.swap_bytes(words)),
        _numbers(codes >> (2 * _BITS), others),
        _numbers(codes >> (3 * _BITS), vector_code.swap_bytes(others)),
    )


@inlined
def _numbers(codes: Any, words: Any) -> Any:
    return reinterpreted(INTS, (words & _SIGN_AND_MANTISSA) | vector_code.look_up(_TABLE, codes))


@njit(nogil=True, boundscheck=False, error_model="numpy")
def add_exceptions(
    beside: int, panels: Any, inputs: int, row_bytes: int, rows: int, sums: Any
) -> None:
    """Sums of some rows grow by the exceptions of some panels. beside: the address of what a
    `Narrowed` has beside it. panels: the first, how many, and of how many at all. inputs: the
    address of the rows. sums: that of sums, and the bytes of a row of them."""
    first, count, all_panels = panels
    sums_at, sums_stride = sums
    firsts_at = beside + all_panels * VECTOR_BYTES
    firsts = array_at(ADDRESS, firsts_at)
    if firsts[first] == firsts[first + count]:
        return
    steps_at = firsts_at + (all_panels + 1) * 8
    steps, end = array_at(ADDRESS, steps_at), steps_at + firsts[all_panels] * 8
    vectors = -(-end // VECTOR_BYTES) * VECTOR_BYTES
    for column in range(count):
        for index in range(firsts[first + column], firsts[first + column + 1]):
            start = (vectors + index * VECTOR_BYTES,)
            source, to = inputs + steps[index] * INPUT_BYTES, sums_at + column * VECTOR_BYTES
            for row in range(rows):
                at, own = source + row * row_bytes, to + row * sums_stride
                total = vector_code.load_sums(1, 1, own, 0)
                total = vector_code.add_steps(BFLOAT16, total, _load_step, start, (), at, 0)
                vector_code.store_sums(total, own, 0)


@inlined
def _load_step(kind: Any, start: int) -> Any:
    return (load(INTS, start),)


class Narrowed(NamedTuple):
    """A weight in 12 bits: int8 [panels, bytes]. Beside it, at a multiple of 64 bytes: float32
    [panels, 16], what sums are multiplied by; int64 [panels + 1], each panel's first exception;
    the step of each exception, int64; and, at the next multiple of 64 bytes, their vectors."""

    numbers: Tensor
    beside: Tensor


class Panels(NamedTuple):
    """Panels of a packed weight, and what is made of each."""

    # [panels, steps, 16, 2] bfloat16.
    packed: Address
    steps: Count
    # [panels, 16, 2] int16: exponents of each output's largest weight.
    highest: Address
    # As in `Narrowed`: numbers; what sums are multiplied by; each panel's first exception.
    numbers: Address
    scales: Address
    firsts: Address
    # [panels] int64: in how many steps there are exceptions.
    counts: Address
    # Of each exception its step, int64, and its vector.
    exception_steps: Address
    vectors: Address


PANELS: Final = struct_type(Panels)


def narrow(packed: Tensor) -> Narrowed:
    """A weight [panels, steps, 16, 2] of bfloat16, as `linear.pack` makes it, in 12 bits; steps a
    multiple of 4. Of an output with weights of 2 ** 34 and more, those may be lost that are
    2 ** -158 times the largest; of any, what is smaller than a normal number."""
    count, steps = packed.shape[:2]
    numbers = aligned(count * steps * STEP_BYTES, torch.int8).view(count, -1)
    scales, highest = torch.empty(count, LANES), aligned(count * 2 * LANES, torch.int16)
    firsts = torch.zeros(count + 1, dtype=torch.int64)
    panels = Panels(
        packed=packed.data_ptr(),
        steps=steps,
        highest=highest.data_ptr(),
        numbers=numbers.data_ptr(),
        scales=scales.data_ptr(),
        firsts=firsts.data_ptr(),
        counts=firsts.data_ptr() + firsts.itemsize,
        exception_steps=0,
        vectors=0,
    )
    narrow_panels(panels, count)
    torch.cumsum(firsts, 0, out=firsts)
    num_exceptions = int(firsts[-1])
    head = torch.cat([scales.flatten().view(torch.int64), firsts])
    vectors_at = -(-(len(head) + num_exceptions) // _LINE) * _LINE
    beside = aligned(vectors_at + num_exceptions * _LINE, torch.int64)
    beside[: len(head)] = head
    panels = panels._replace(
        exception_steps=beside[len(head) :].data_ptr(), vectors=beside[vectors_at:].data_ptr()
    )
    list_exceptions(panels, count)
    return Narrowed(numbers, beside)


@njit(parallel=True, nogil=True, cache=True, boundscheck=False, error_model="numpy")
def narrow_panels(panels: Panels, count: int) -> None:
    """All but the exceptions, which are counted."""
    for panel in prange(count):
        _narrow_panel(panels, panel)


@njit(parallel=True, nogil=True, cache=True, boundscheck=False, error_model="numpy")
def list_exceptions(panels: Panels, count: int) -> None:
    """Which steps have exceptions, and their vectors."""
    for panel in prange(count):
        _list_panel(panels, panel)


@inlined
def _narrow_panel(panels: Panels, panel: int) -> None:
    steps = panels.steps
    source = panels.packed + panel * steps * VECTOR_BYTES
    bases = panels.highest + panel * VECTOR_BYTES
    target = panels.numbers + panel * steps * STEP_BYTES
    highest = filled(WORDS, _LEAST)
    for step in range(steps):
        found = _exponents(load(WORDS, source + step * VECTOR_BYTES))
        highest = chosen((found < _INFINITE) & (found > highest), found, highest)
    store(highest, bases)
    exponents = array_at(BFLOAT16, bases)
    bits = array_at(np.int32(0), panels.scales + panel * VECTOR_BYTES)
    for output in range(LANES):
        base = max(exponents[2 * output], exponents[2 * output + 1])
        exponents[2 * output] = exponents[2 * output + 1] = base
        # A float32 that is a power of two.
        bits[output] = (np.int32(base) - _TOP + 127) << 23
    highest = load(WORDS, bases)
    count, unused = 0, scratch(1)
    for step in range(0, steps, STEPS):
        if _put_codes(source + step * VECTOR_BYTES, highest, target + step * STEP_BYTES):
            for one in range(step, step + STEPS):
                count += _put_exceptions(source + one * VECTOR_BYTES, highest, unused)
    array_at(ADDRESS, panels.counts)[panel] = count


@inlined
def _list_panel(panels: Panels, panel: int) -> None:
    firsts = array_at(ADDRESS, panels.firsts)
    source = panels.packed + panel * panels.steps * VECTOR_BYTES
    highest = load(WORDS, panels.highest + panel * VECTOR_BYTES)
    index, step = firsts[panel], 0
    while index < firsts[panel + 1]:
        to = panels.vectors + index * VECTOR_BYTES
        if _put_exceptions(source + step * VECTOR_BYTES, highest, to):
            array_at(ADDRESS, panels.exception_steps)[index] = step
            index += 1
        step += 1


@inlined
def _exponents(words: Any) -> Any:
    return (words >> _EXPONENT_AT) & 255


@inlined
def _code(words: Any, highest: Any) -> Any:
    """Codes of a vector; where they are some; and where there is a number without one."""
    exponents = _exponents(words)
    code = exponents - highest + (_NUM_CODES - 1)
    # Beside numbers too small to have an exponent.
    is_number = exponents != 0
    is_coded = is_number & (code >= 1) & (code < _NUM_CODES)
    return code, is_coded, is_number & ((code < 1) | (code >= _NUM_CODES))


@inlined
def _coded(address: int, highest: Any) -> Any:
    """Codes of the vector at an address, 0 where they are none; its signs and mantissas; and where
    there are exceptions."""
    words = load(WORDS, address)
    code, is_coded, is_exception = _code(words, highest)
    kept = chosen(is_coded, words & _SIGN_AND_MANTISSA, 0)
    return chosen(is_coded, code, 0), kept, is_exception


@inlined
def _put_codes(vectors: int, highest: Any, target: int) -> Any:
    """Four steps at an address become 12 bits at another; whether there are exceptions."""
    code_0, kept_0, is_0 = _coded(vectors, highest)
    code_1, kept_1, is_1 = _coded(vectors + VECTOR_BYTES, highest)
    code_2, kept_2, is_2 = _coded(vectors + 2 * VECTOR_BYTES, highest)
    code_3, kept_3, is_3 = _coded(vectors + 3 * VECTOR_BYTES, highest)
    lower, upper = code_0 | (code_1 << _BITS), code_2 | (code_3 << _BITS)
    store(lower | (upper << (2 * _BITS)), target)
    store(kept_0 | vector_code.swap_bytes(kept_1), target + VECTOR_BYTES)
    store(kept_2 | vector_code.swap_bytes(kept_3), target + 2 * VECTOR_BYTES)
    return vector_code.is_any(is_0 | is_1 | is_2 | is_3)


@inlined
def _put_exceptions(vector: int, highest: Any, target: int) -> Any:
    """What of a vector has no code, multiplied by the power of two of its output; whether there is
    any."""
    words = load(WORDS, vector)
    code, _, is_exception = _code(words, highest)
    exponents = code + (_TOP - _NUM_CODES + 1)
    moved = (words & _SIGN_AND_MANTISSA) | (exponents << _EXPONENT_AT)
    moved = chosen(exponents > 0, moved, 0)
    moved = chosen(_exponents(words) == _INFINITE, words, moved)
    store(chosen(is_exception, moved, 0), target)
    return vector_code.is_any(is_exception)
