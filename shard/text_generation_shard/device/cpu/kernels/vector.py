"""One code for several kinds of numbers.

The numba type of a marker is the kind: uint16 is bfloat16, float32 is itself. Rows are of one of
these two kinds; weights have more kinds.
"""

from typing import Any, Final

import numpy as np
import torch
from numba import njit
from torch import Tensor

from text_generation_shard.device.cpu.kernels import are_vectors_wide, llvm, vector_code
from text_generation_shard.device.cpu.kernels.cache import choose_directory
from text_generation_shard.device.cpu.kernels.llvm import FLOATS, INTS, LANES, SHORTS, VECTOR_BYTES

# Here, because numba reads the setting when it decorates a cached function, and all files with such
# functions import this one.
choose_directory()

STEP_BYTES: Final = 4
"""Bytes of a row per step of `tile`."""

BFLOAT16: Final = np.uint16(0)
FLOAT32: Final = np.float32(0)
ADDRESS: Final = np.int64(0)
INT8: Final = np.int8(0)
"""Weights of a bfloat16 product: int8."""
INT4: Final = np.uint8(0)
"""Weights of a bfloat16 product: int4, see `grouped`."""
BFLOAT12: Final = np.int16(0)
"""Weights of a bfloat16 product: bfloat16 in 12 bits, see `bfloat12`."""

INTERNAL: Final[Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
"""Options of functions that neither Python nor `llvm.call` calls: they compile faster."""

inlined: Any = njit(forceinline=True, boundscheck=False, **INTERNAL)
"""Decorator of functions that are always inlined."""

_IS_WIDE: Final = are_vectors_wide()
_LOG2_E: Final = 1.4426950408889634
# The exponent of the smallest normal number.
_LOWEST: Final = -126.0
# Polynomials of 2 ** f for f in [0, 1], highest power first; exact at 0. Minimax fits with relative
# errors of at most 9e-5 (rounding to bfloat16: 2e-3) and 2e-9.
_SHORT_SERIES: Final = (0.07706706865913662, 0.22764496183962538, 0.6951167931865881, 1.0)
_LONG_SERIES: Final = (
    2.161291914548068e-4,
    1.2467845340325193e-3,
    9.675451674202822e-3,
    5.548528057202427e-2,
    2.4022930556094527e-1,
    6.93147044442802e-1,
    1.0,
)


def marker(dtype: torch.dtype) -> Any:
    """The marker of rows of this dtype."""
    return {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}[dtype]


def tensor_address(tensor: Tensor | None, dtype: torch.dtype | None = None) -> int:
    """The address of a tensor's numbers; 0: no tensor. Kernels take them as contiguous, and of
    `dtype` if one is given: another layout would be misread."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), f"{tuple(tensor.shape)} has strides {tensor.stride()}"
    assert dtype is None or tensor.dtype == dtype, f"{tensor.dtype} instead of {dtype}"
    return tensor.data_ptr()


def aligned(size: int, dtype: torch.dtype) -> Tensor:
    """An empty, 64-byte aligned tensor of `size` numbers."""
    memory = torch.empty(size + VECTOR_BYTES // dtype.itemsize, dtype=dtype)
    start = -memory.data_ptr() % VECTOR_BYTES // dtype.itemsize
    return memory[start : start + size]


def numbers_per_step(dtype: torch.dtype) -> int:
    """Numbers of a row per step."""
    return STEP_BYTES // dtype.itemsize


@inlined
def widen(shorts: Any) -> Any:
    """Convert 16 bfloat16, the upper halves of float32, to float32."""
    return llvm.reinterpreted(FLOATS, llvm.converted(INTS, shorts) << 16)


@inlined
def load_numbers(kind: Any, address: int, count: int) -> Any:
    """Load the first `count` of 16 numbers as float32; the others are 0."""
    if llvm.itemsize(kind) == 2:
        return widen(
            llvm.load(SHORTS, address)
            if count == LANES
            else llvm.load_first(SHORTS, address, count)
        )
    return llvm.load(FLOATS, address) if count == LANES else llvm.load_first(FLOATS, address, count)


@inlined
def store_numbers(kind: Any, value: Any, address: int, count: int) -> Any:
    """Store the first `count` of 16 float32 as numbers of a kind; returns the rounded values."""
    if llvm.itemsize(kind) == 2:
        numbers = vector_code.round_to_bfloat16(value)
        if count == LANES:
            llvm.store(numbers, address)
        else:
            llvm.store_first(numbers, address, count)
        return widen(numbers)
    if count == LANES:
        llvm.store(value, address)
    else:
        llvm.store_first(value, address, count)
    return value


@inlined
def exponential(kind: Any, value: Any) -> Any:
    """e ** value for values <= 0, as precise as the kind; exactly 1 for 0."""
    value = value * _LOG2_E
    if _IS_WIDE:
        return vector_code.scaled(_power(kind, vector_code.above_floor(value)), value)
    value = llvm.chosen(value > _LOWEST, value, _LOWEST)
    whole = vector_code.floor(value)
    exponent = (llvm.converted(INTS, whole) + 127) << 23
    return _power(kind, value - whole) * llvm.reinterpreted(FLOATS, exponent)


@inlined
def _power(kind: Any, part: Any) -> Any:
    """2 ** part for parts from 0 to 1."""
    if llvm.itemsize(kind) == 2:
        return vector_code.polynomial(part, _SHORT_SERIES)
    return vector_code.polynomial(part, _LONG_SERIES)
