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

from typing import Any, Final

from llvmlite import ir

from text_generation_shard.device.cpu.kernels.llvm import (
    INT64,
    INTS,
    LANES,
    SHORTS,
    VECTOR_BYTES,
    call,
    load,
)

STEPS: Final = 4
"""Steps that lie together: a vector of their codes, and two of signs and mantissas, each of two."""
STEP_BYTES: Final = 3 * VECTOR_BYTES // STEPS

BITS: Final = 4
NUM_CODES: Final = 2**BITS
# The exponent that each output's largest weight gets: far enough above 0 for all that an output's
# weights may differ by, and far enough below 255 for sums.
TOP: Final = 160
# The largest exponent that a weight is taken to have at least: its power of two is a float32.
LEAST: Final = 40
INFINITE: Final = 255
# Of a bfloat16.
SIGN_AND_MANTISSA: Final = 0x807F
EXPONENT_AT: Final = 7
# Code 0 is the number 0. Of an index into 32 numbers 5 bits count: a code, and one bit of its
# neighbour that may be anything.
_EXPONENTS: Final = [0] + [TOP - NUM_CODES + 1 + code for code in range(1, NUM_CODES)]
_TABLE: Final = ir.Constant(SHORTS, [number << EXPONENT_AT for number in _EXPONENTS] * 2)


def load_steps(builder: Any, address: Any) -> list[Any]:
    """The four vectors of pairs of bfloat16 that lie at an address."""
    codes = load(builder, address, SHORTS, VECTOR_BYTES)
    vectors = []
    for step in range(STEPS):
        at = builder.add(address, INT64((1 + step // 2) * VECTOR_BYTES))
        words = load(builder, at, SHORTS, VECTOR_BYTES)
        if step % 2:
            words = turned(builder, words)
        places = builder.lshr(codes, shorts(BITS * step)) if step else codes
        name = "llvm.x86.avx512.permvar.hi.512"
        exponents = call(builder, name, SHORTS, _TABLE, places)
        numbers = builder.or_(builder.and_(words, shorts(SIGN_AND_MANTISSA)), exponents)
        vectors.append(builder.bitcast(numbers, INTS))
    return vectors


def shorts(number: int) -> Any:
    """A vector of 32 times the same whole number."""
    return ir.Constant(SHORTS, [number] * 2 * LANES)


def turned(builder: Any, words: Any) -> Any:
    """The bytes of each word, exchanged."""
    return call(builder, "llvm.bswap.v32i16", SHORTS, words)
