"""bfloat16 weights in 12 bits, without loss: their exponents take 4 bits instead of 8.

Why it is fast: a decode step reads all weights, and this is three quarters of the bytes. The
exponents of trained weights have an entropy below 3 bits (Zhang et al. 2025, DFloat11, with codes
of variable length). Nearly all exponents of one output are among the 15 values up to its largest.
So codes of one length suffice, and a table of 16 decodes them: two instructions for 32 weights.

Each output's weights are multiplied by a power of two, exactly, so that one table serves all; sums
are multiplied by its inverse. A smaller weight has code 0, and is an exception: a step in bfloat16
that is added after all others. The result is that of bfloat16, except for the position of
exceptions in the sum.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import int64, njit
from torch import Tensor

from text_generation_shard.device.cpu.kernels import (
    Address,
    Count,
    llvm,
    struct_type,
    vector,
)
from text_generation_shard.device.cpu.kernels.llvm import INTS, LANES, VECTOR_BYTES, WORDS
from text_generation_shard.device.cpu.kernels.thread_pool import compute_all
from text_generation_shard.device.cpu.kernels.vector import ADDRESS, BFLOAT16

STEPS: Final = 4
"""Steps stored together: a vector of codes, then two vectors of signs and mantissas of two steps
each."""
STEP_BYTES: Final = 3 * VECTOR_BYTES // STEPS

_BITS: Final = 4
_NUM_CODES: Final = 2**_BITS
# The exponent of each output's largest weight after scaling: far enough above 0 for the range of an
# output's weights, and far enough below 255 for sums.
_TOP: Final = 160
# Least value of an output's largest exponent, so that its power of two is a float32.
_LEAST: Final = 40
_INFINITE: Final = 255
# Fields of a bfloat16.
_SIGN_AND_MANTISSA: Final = 0x807F
_EXPONENT_AT: Final = 7
# Code 0 is the number 0. A table lookup uses 5 bits of an index: a code, and an arbitrary bit of
# the next code. So the table holds each exponent twice.
_EXPONENTS: Final = [0] + [_TOP - _NUM_CODES + 1 + code for code in range(1, _NUM_CODES)]
_TABLE: Final = llvm.Table(WORDS, [number << _EXPONENT_AT for number in _EXPONENTS] * 2)
# int64 per vector.
_LINE: Final = VECTOR_BYTES // 8


@vector.inlined
def decoded(address: int) -> Any:
    """Decode the four steps at an address to vectors of pairs of bfloat16."""
    codes, words = llvm.load(WORDS, address), llvm.load(WORDS, address + VECTOR_BYTES)
    others = llvm.load(WORDS, address + 2 * VECTOR_BYTES)
    return (
        _numbers(codes, words),
        _numbers(codes >> _BITS, vector.swap_bytes(words)),
        _numbers(codes >> (2 * _BITS), others),
        _numbers(codes >> (3 * _BITS), vector.swap_bytes(others)),
    )


@vector.inlined
def _numbers(codes: Any, words: Any) -> Any:
    return llvm.reinterpreted(INTS, (words & _SIGN_AND_MANTISSA) | vector.look_up(_TABLE, codes))


@njit(nogil=True, boundscheck=False, error_model="numpy")
def add_exceptions(
    beside: int, panel: int, all_panels: int, inputs: int, row_bytes: int, sums: Any, rows: int
) -> None:
    """Add the exceptions of a panel, one of `all_panels`, to the sums of a tile of some rows.
    beside: address of `Narrowed.beside`; inputs: address of the rows; sums: address and stride."""
    firsts_at = beside + all_panels * VECTOR_BYTES
    firsts = llvm.array_at(ADDRESS, firsts_at)
    if firsts[panel] == firsts[panel + 1]:
        return
    steps_at = firsts_at + (all_panels + 1) * 8
    steps, end = llvm.array_at(ADDRESS, steps_at), steps_at + firsts[all_panels] * 8
    vectors = -(-end // VECTOR_BYTES) * VECTOR_BYTES
    for index in range(firsts[panel], firsts[panel + 1]):
        start, source = (vectors + index * VECTOR_BYTES,), inputs + steps[index] * vector.STEP_BYTES
        for row in range(rows):
            at, own = source + row * row_bytes, sums[0] + row * sums[1]
            total = vector.load_sums(1, 1, own, 0)
            total = vector.add_steps(BFLOAT16, total, load_step, start, (), at, 0)
            vector.store_sums(total, 1, own, 0)


@vector.inlined
def load_step(kind: Any, start: int) -> Any:
    """For `add_steps`: the pairs of one step."""
    return (llvm.load(INTS, start),)


class Narrowed(NamedTuple):
    """A weight in 12 bits: int8 [panels, bytes]. `beside` is 64-byte aligned: scales of sums,
    float32 [panels, 16]; each panel's first exception, int64 [panels + 1]; the step of each
    exception, int64; and, at the next multiple of 64 bytes, the vectors of the exceptions."""

    numbers: Tensor
    beside: Tensor


class Panels(NamedTuple):
    """Panels of a packed weight, and the results for each."""

    # [panels, steps, 16, 2] bfloat16.
    packed: Address
    steps: Count
    # [panels, 16, 2] int16: largest exponent of each output.
    highest: Address
    # As in `Narrowed`: numbers, scales of sums, each panel's first exception.
    numbers: Address
    scales: Address
    firsts: Address
    # [panels] int64: number of steps with exceptions.
    counts: Address
    # Step (int64) and vector of each exception.
    exception_steps: Address
    vectors: Address


PANELS: Final = struct_type(Panels)


def narrow(packed: Tensor) -> Narrowed:
    """Convert a bfloat16 weight [panels, steps, 16, 2] of `matrices.pack` to 12 bits; steps is a
    multiple of 4. Subnormal weights become 0; and in an output with weights of 2 ** 34 or more,
    weights below 2 ** -158 times the largest may become 0."""
    count, steps = packed.shape[:2]
    numbers = vector.aligned(count * steps * STEP_BYTES, torch.int8).view(count, -1)
    scales, highest = torch.empty(count, LANES), vector.aligned(count * 2 * LANES, torch.int16)
    firsts = torch.zeros(count + 1, dtype=torch.int64)
    panels = Panels(
        packed=vector.tensor_address(packed, torch.bfloat16),
        steps=steps,
        highest=vector.tensor_address(highest),
        numbers=vector.tensor_address(numbers),
        scales=vector.tensor_address(scales),
        firsts=vector.tensor_address(firsts),
        counts=vector.tensor_address(firsts[1:]),
        exception_steps=0,
        vectors=0,
    )
    _compute(narrow_panel, panels, count)
    torch.cumsum(firsts, 0, out=firsts)
    num_exceptions = int(firsts[-1])
    head = torch.cat([scales.flatten().view(torch.int64), firsts])
    vectors_at = -(-(len(head) + num_exceptions) // _LINE) * _LINE
    beside = vector.aligned(vectors_at + num_exceptions * _LINE, torch.int64)
    beside[: len(head)] = head
    panels = panels._replace(
        exception_steps=vector.tensor_address(beside[len(head) :]),
        vectors=vector.tensor_address(beside[vectors_at:]),
    )
    _compute(list_exceptions, panels, count)
    return Narrowed(numbers, beside)


def _compute(kernel: Any, panels: Panels, count: int) -> None:
    compute_all(llvm.address_of(kernel, (PANELS, int64)), panels, count, True)


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def narrow_panel(panels: Panels, panel: int) -> None:
    """Convert a panel, and count its exceptions."""
    steps = panels.steps
    source = panels.packed + panel * steps * VECTOR_BYTES
    bases = panels.highest + panel * VECTOR_BYTES
    target = panels.numbers + panel * steps * STEP_BYTES
    highest = llvm.filled(WORDS, _LEAST)
    for step in range(steps):
        found = _exponents(llvm.load(WORDS, source + step * VECTOR_BYTES))
        highest = llvm.chosen((found < _INFINITE) & (found > highest), found, highest)
    llvm.store(highest, bases)
    exponents = llvm.array_at(BFLOAT16, bases)
    bits = llvm.array_at(np.int32(0), panels.scales + panel * VECTOR_BYTES)
    for output in range(LANES):
        base = max(exponents[2 * output], exponents[2 * output + 1])
        exponents[2 * output] = exponents[2 * output + 1] = base
        # A power of two as float32.
        bits[output] = (np.int32(base) - _TOP + 127) << 23
    highest = llvm.load(WORDS, bases)
    count, unused = 0, llvm.scratch(1)
    for step in range(0, steps, STEPS):
        if _store_codes(source + step * VECTOR_BYTES, highest, target + step * STEP_BYTES):
            for one in range(step, step + STEPS):
                count += _store_exceptions(source + one * VECTOR_BYTES, highest, unused)
    llvm.array_at(ADDRESS, panels.counts)[panel] = count


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def list_exceptions(panels: Panels, panel: int) -> None:
    """Write the steps and vectors of a panel's exceptions."""
    firsts = llvm.array_at(ADDRESS, panels.firsts)
    source = panels.packed + panel * panels.steps * VECTOR_BYTES
    highest = llvm.load(WORDS, panels.highest + panel * VECTOR_BYTES)
    index, step = firsts[panel], 0
    while index < firsts[panel + 1]:
        to = panels.vectors + index * VECTOR_BYTES
        if _store_exceptions(source + step * VECTOR_BYTES, highest, to):
            llvm.array_at(ADDRESS, panels.exception_steps)[index] = step
            index += 1
        step += 1


@vector.inlined
def _exponents(words: Any) -> Any:
    return (words >> _EXPONENT_AT) & 255


@vector.inlined
def _code(words: Any, highest: Any) -> Any:
    """Codes of a vector; a mask of valid codes; a mask of exceptions."""
    exponents = _exponents(words)
    code = exponents - highest + (_NUM_CODES - 1)
    # Not for subnormal numbers.
    is_number = exponents != 0
    is_coded = is_number & (code >= 1) & (code < _NUM_CODES)
    return code, is_coded, is_number & ((code < 1) | (code >= _NUM_CODES))


@vector.inlined
def _coded(address: int, highest: Any) -> Any:
    """Codes of the vector at an address, 0 where invalid; its signs and mantissas; and a mask of
    exceptions."""
    words = llvm.load(WORDS, address)
    code, is_coded, is_exception = _code(words, highest)
    kept = llvm.chosen(is_coded, words & _SIGN_AND_MANTISSA, 0)
    return llvm.chosen(is_coded, code, 0), kept, is_exception


@vector.inlined
def _store_codes(vectors: int, highest: Any, target: int) -> Any:
    """Encode four steps at `vectors` to `target`; whether there are exceptions."""
    code_0, kept_0, is_0 = _coded(vectors, highest)
    code_1, kept_1, is_1 = _coded(vectors + VECTOR_BYTES, highest)
    code_2, kept_2, is_2 = _coded(vectors + 2 * VECTOR_BYTES, highest)
    code_3, kept_3, is_3 = _coded(vectors + 3 * VECTOR_BYTES, highest)
    lower, upper = code_0 | (code_1 << _BITS), code_2 | (code_3 << _BITS)
    llvm.store(lower | (upper << (2 * _BITS)), target)
    llvm.store(kept_0 | vector.swap_bytes(kept_1), target + VECTOR_BYTES)
    llvm.store(kept_2 | vector.swap_bytes(kept_3), target + 2 * VECTOR_BYTES)
    return vector.is_any(is_0 | is_1 | is_2 | is_3)


@vector.inlined
def _store_exceptions(source: int, highest: Any, target: int) -> Any:
    """Store the exceptions of the vector at `source`, multiplied by the power of two of their
    outputs; whether there are any."""
    words = llvm.load(WORDS, source)
    code, _, is_exception = _code(words, highest)
    exponents = code + (_TOP - _NUM_CODES + 1)
    moved = (words & _SIGN_AND_MANTISSA) | (exponents << _EXPONENT_AT)
    moved = llvm.chosen(exponents > 0, moved, 0)
    moved = llvm.chosen(_exponents(words) == _INFINITE, words, moved)
    llvm.store(llvm.chosen(is_exception, moved, 0), target)
    return vector.is_any(is_exception)
