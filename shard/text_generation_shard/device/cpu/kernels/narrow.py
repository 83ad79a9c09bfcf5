"""Making 12 bits of bfloat16: see `bfloat12`."""

from functools import reduce
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import njit, prange, types
from numba.extending import intrinsic
from torch import Tensor

from text_generation_shard.device.cpu.kernels.bfloat12 import (
    BITS,
    EXPONENT_AT,
    INFINITE,
    LEAST,
    NUM_CODES,
    SIGN_AND_MANTISSA,
    STEP_BYTES,
    STEPS,
    TOP,
    shorts,
    turned,
)
from text_generation_shard.device.cpu.kernels.calls import Address, Count, struct_type
from text_generation_shard.device.cpu.kernels.llvm import (
    INT32,
    INT64,
    LANES,
    SHORTS,
    VECTOR_BYTES,
    load,
)
from text_generation_shard.device.cpu.kernels.vector import (
    ADDRESS,
    BFLOAT16,
    aligned,
    array_at,
    scratch,
)

# int64 to a vector.
_LINE: Final = VECTOR_BYTES // 8


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


@njit(nogil=True, boundscheck=False, error_model="numpy")
def _narrow_panel(panels: Panels, panel: int) -> None:
    steps = panels.steps
    source = panels.packed + panel * steps * VECTOR_BYTES
    bases = panels.highest + panel * VECTOR_BYTES
    target = panels.numbers + panel * steps * STEP_BYTES
    exponents = array_at(BFLOAT16, bases)
    bits = array_at(np.int32(0), panels.scales + panel * VECTOR_BYTES)
    for lane in range(2 * LANES):
        exponents[lane] = LEAST
    for step in range(steps):
        _raise_exponents(source + step * VECTOR_BYTES, bases)
    for output in range(LANES):
        base = max(exponents[2 * output], exponents[2 * output + 1])
        exponents[2 * output] = exponents[2 * output + 1] = base
        # A float32 that is a power of two.
        bits[output] = (np.int32(base) - TOP + 127) << 23
    count, unused = 0, scratch(1)
    for step in range(0, steps, STEPS):
        if _put_codes(source + step * VECTOR_BYTES, bases, target + step * STEP_BYTES):
            for one in range(step, step + STEPS):
                count += _put_exceptions(source + one * VECTOR_BYTES, bases, unused)
    array_at(ADDRESS, panels.counts)[panel] = count


@njit(nogil=True, boundscheck=False, error_model="numpy")
def _list_panel(panels: Panels, panel: int) -> None:
    firsts = array_at(ADDRESS, panels.firsts)
    source = panels.packed + panel * panels.steps * VECTOR_BYTES
    bases = panels.highest + panel * VECTOR_BYTES
    index, step = firsts[panel], 0
    while index < firsts[panel + 1]:
        to = panels.vectors + index * VECTOR_BYTES
        if _put_exceptions(source + step * VECTOR_BYTES, bases, to):
            array_at(ADDRESS, panels.exception_steps)[index] = step
            index += 1
        step += 1


@intrinsic
def _raise_exponents(typingctx: Any, vector: Any, highest: Any) -> Any:
    """32 exponents at an address become those of a vector at another where these are larger, and
    finite."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        exponents = _exponents(builder, load(builder, arguments[0], SHORTS, VECTOR_BYTES))
        is_finite = builder.icmp_unsigned("<", exponents, shorts(INFINITE))
        before = load(builder, arguments[1], SHORTS, VECTOR_BYTES)
        is_larger = builder.icmp_unsigned(">", exponents, before)
        highest = builder.select(builder.and_(is_finite, is_larger), exponents, before)
        _store(builder, highest, arguments[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _put_codes(typingctx: Any, vectors: Any, highest: Any, target: Any) -> Any:
    """Four steps at an address become 12 bits at another; whether there are exceptions."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors, highest, target = arguments
        codes, halves, are_exceptions = shorts(0), [shorts(0)] * 2, []
        for step in range(STEPS):
            at = builder.add(vectors, INT64(step * VECTOR_BYTES))
            words = load(builder, at, SHORTS, VECTOR_BYTES)
            code, is_coded, is_exception = _code(builder, words, highest)
            kept = builder.and_(words, shorts(SIGN_AND_MANTISSA))
            kept = builder.select(is_coded, kept, shorts(0))
            code = builder.select(is_coded, code, shorts(0))
            codes = builder.or_(codes, builder.shl(code, shorts(BITS * step)))
            kept = turned(builder, kept) if step % 2 else kept
            halves[step // 2] = builder.or_(halves[step // 2], kept)
            are_exceptions.append(is_exception)
        for place, words in enumerate((codes, *halves)):
            _store(builder, words, builder.add(target, INT64(place * VECTOR_BYTES)))
        return _any(builder, reduce(builder.or_, are_exceptions))

    return types.boolean(*(types.int64,) * 3), generate


@intrinsic
def _put_exceptions(typingctx: Any, vector: Any, highest: Any, target: Any) -> Any:
    """What of a vector has no code, multiplied by the power of two of its output; whether there is
    any."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector, highest, target = arguments
        words = load(builder, vector, SHORTS, VECTOR_BYTES)
        code, _, is_exception = _code(builder, words, highest)
        exponents = builder.add(code, shorts(TOP - NUM_CODES + 1))
        is_normal = builder.icmp_signed(">", exponents, shorts(0))
        is_infinite = builder.icmp_unsigned("==", _exponents(builder, words), shorts(INFINITE))
        moved = builder.and_(words, shorts(SIGN_AND_MANTISSA))
        moved = builder.or_(moved, builder.shl(exponents, shorts(EXPONENT_AT)))
        moved = builder.select(is_infinite, words, builder.select(is_normal, moved, shorts(0)))
        _store(builder, builder.select(is_exception, moved, shorts(0)), target)
        return _any(builder, is_exception)

    return types.boolean(*(types.int64,) * 3), generate


def _code(builder: Any, words: Any, highest: Any) -> tuple[Any, Any, Any]:
    """Codes of a vector; where they are some; and where there is a number without one."""
    exponents, base = _exponents(builder, words), load(builder, highest, SHORTS, VECTOR_BYTES)
    code = builder.add(builder.sub(exponents, base), shorts(NUM_CODES - 1))
    is_coded = builder.icmp_unsigned("<", builder.sub(code, shorts(1)), shorts(NUM_CODES - 1))
    is_number = builder.icmp_unsigned("!=", exponents, shorts(0))
    # Beside numbers too small to have an exponent.
    is_coded = builder.and_(is_coded, is_number)
    return code, is_coded, builder.and_(is_number, builder.not_(is_coded))


def _exponents(builder: Any, words: Any) -> Any:
    return builder.and_(builder.lshr(words, shorts(EXPONENT_AT)), shorts(255))


def _any(builder: Any, are: Any) -> Any:
    return builder.icmp_unsigned("!=", builder.bitcast(are, INT32), INT32(0))


def _store(builder: Any, words: Any, address: Any) -> None:
    builder.store(words, builder.inttoptr(address, SHORTS.as_pointer()), align=VECTOR_BYTES)
