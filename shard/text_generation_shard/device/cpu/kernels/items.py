"""All items of one kernel, computed by a call from Python.

An item is `kernel(given, index)`, where `given` is a struct of arguments; the field `kind` is a
marker, see `vector`. A pass of a whole model computes the same items as phases, see `layers`.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import boolean, from_dtype, int64, njit, prange

from text_generation_shard.device.cpu.kernels import struct_type
from text_generation_shard.device.cpu.kernels.llvm import address_of, call


def item_signature(struct: type, kind: Any) -> tuple[Any, ...]:
    """Signature of a kernel's item for markers of this type."""
    return struct_type(struct, kind=kind), int64


def all_signature(given: Any) -> tuple[Any, ...]:
    """Signature of `compute_all` for a struct of this type."""
    return int64, given, int64, boolean


def compute(kernel: Any, given: Any, count: int, is_shared: bool) -> None:
    """Compute `count` items; is_shared: in several threads, which cost something to start."""
    struct: Any = type(given)
    compute_all(_code(kernel, struct, given.kind.dtype), given, count, is_shared)


@cache
def _code(kernel: Any, struct: Any, dtype: Any) -> int:
    return address_of(kernel, item_signature(struct, from_dtype(dtype)))


@njit(parallel=True, nogil=True, cache=True, boundscheck=False, error_model="numpy")
def compute_all(code: int, given: Any, count: int, is_shared: bool) -> None:
    """`compute` with the address of the kernel, see `llvm.call`."""
    if is_shared:
        for index in prange(count):
            call(code, (given, np.int64(index)))
    else:
        for index in range(count):
            call(code, (given, np.int64(index)))
