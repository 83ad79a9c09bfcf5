"""Numbers of two kinds under the same code.

bfloat16 and float32 are told apart by the numba type of a marker: uint16 stands for bfloat16,
float32 for itself. LLVM code as intrinsics for numba's compiler.
"""

from typing import Any, Final

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from text_generation_shard.device.cpu.kernels.cache import choose_directory
from text_generation_shard.device.cpu.kernels.llvm import (
    FLOAT,
    INT16,
    INT32,
    INT64,
    INTS,
    VECTOR_BYTES,
)

# Here, because numba asks when it meets a function to be kept, and all of them import this module.
choose_directory()

STEP_BYTES: Final = 4
"""Of a row, what one step of `tile` multiplies."""

BFLOAT16: Final = np.uint16(0)
FLOAT32: Final = np.float32(0)
ADDRESS: Final = np.int64(0)
INT8: Final = np.int8(0)
"""As weights of a bfloat16 product: whole numbers, a byte each."""
INT4: Final = np.uint8(0)
"""Likewise: see `grouped`."""
BFLOAT12: Final = np.int16(0)
"""Likewise: bfloat16 in 12 bits, see `bfloat12`."""


def marker(dtype: torch.dtype) -> Any:
    """What tells the kernels which kind of numbers they get."""
    return {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}[dtype]


def aligned(size: int, dtype: torch.dtype) -> Tensor:
    """An empty tensor of `size` numbers that begins at a multiple of 64 bytes."""
    memory = torch.empty(size + VECTOR_BYTES // dtype.itemsize, dtype=dtype)
    start = -memory.data_ptr() % VECTOR_BYTES // dtype.itemsize
    return memory[start : start + size]


def numbers_per_step(dtype: torch.dtype) -> int:
    """How many numbers of a row one step multiplies."""
    return STEP_BYTES // dtype.itemsize


@intrinsic(prefer_literal=True)
def array_at(typingctx: Any, kind: Any, address: Any) -> Any:
    """A view of numbers of the marker's own type, to be indexed from 0 like a C pointer."""
    pointer = types.CPointer(kind)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[1], context.get_value_type(pointer))

    return pointer(kind, types.int64), generate


@intrinsic(prefer_literal=True)
def rounded(typingctx: Any, kind: Any, value: Any) -> Any:
    """A float32 as a number of this kind: rounded to bfloat16 bits (to nearest, ties to even; not
    for NaN with other than the usual bits), or as it is."""
    is_pairs = kind == types.uint16

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = arguments[1]
        if not is_pairs:
            return value
        bits = builder.bitcast(value, INT32)
        last = builder.and_(builder.lshr(bits, INT32(16)), INT32(1))
        bits = builder.add(bits, builder.add(last, INT32(0x7FFF)))
        return builder.trunc(builder.lshr(bits, INT32(16)), INT16)

    number = types.uint16 if is_pairs else types.float32
    return number(kind, types.float32), generate


@intrinsic(prefer_literal=True)
def widened(typingctx: Any, kind: Any, number: Any) -> Any:
    """A number of this kind as float32."""
    is_pairs = kind == types.uint16

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not is_pairs:
            return arguments[1]
        wide = builder.shl(builder.zext(arguments[1], INT32), INT32(16))
        return builder.bitcast(wide, FLOAT)

    return types.float32(kind, types.uint16 if is_pairs else types.float32), generate


@intrinsic
def itemsize(typingctx: Any, kind: Any) -> Any:
    """Bytes of a number of this kind."""
    size = 2 if kind == types.uint16 else 4

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return INT64(size)

    return types.int64(kind), generate


@intrinsic(prefer_literal=True)
def scratch(typingctx: Any, num_vectors: Any) -> Any:
    """The address of so many vectors (a literal) on the stack of the function that calls this.

    They are the same ones whenever that call is repeated, and begin as anything.
    """
    if not isinstance(num_vectors, types.IntegerLiteral):
        return None
    count = num_vectors.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():
            memory = builder.alloca(INTS, size=INT32(count))
            memory.align = VECTOR_BYTES
        return builder.ptrtoint(memory, INT64)

    return types.int64(num_vectors), generate
