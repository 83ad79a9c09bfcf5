"""Where the GPU kernels are tested: on a GPU, or with numpy in Triton's interpreter, which
`conftest` enables if there is none."""

import os
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from text_generation_shard.device.base import DeviceOptions
from text_generation_shard.device.cuda.device import FIRST_WITH_CACHE
from text_generation_shard.device.cuda.operators import TritonDevice
from triton.runtime import interpreter


def _multiply_bfloat16() -> None:
    """In the interpreter, `tl.dot` multiplies the bits of bfloat16 as integers (triton issue
    11584): convert to float32."""
    plain = interpreter.InterpreterBuilder.create_dot

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar is not tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, left: Any, right: Any, *others: Any) -> Any:
        return plain(self, wide(left), wide(right), *others)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _convert_float8() -> None:
    """The interpreter's float8 conversion is wrong for rounding up to a power of two, NaN, infinity
    and the smallest numbers: let torch convert."""
    plain = interpreter.InterpreterBuilder.create_fp_to_fp
    kinds = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
    targets = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source.dtype.scalar, target.scalar) == (tl.float32, tl.float8e4nv):
            octets = torch.from_numpy(source.data).to(torch.float8_e4m3fn).view(torch.uint8)
            return interpreter.TensorHandle(octets.numpy(), tl.float8e4nv)
        kind = kinds.get(source.dtype.scalar)
        if kind is None:
            return plain(self, source, target, rounding)
        wide = torch.from_numpy(source.data).view(kind).to(targets[target.scalar])
        bits = wide.view(torch.uint16) if wide.dtype is torch.bfloat16 else wide
        return interpreter.TensorHandle(bits.numpy(), target.scalar)

    interpreter.InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


if "TRITON_INTERPRET" in os.environ:
    _multiply_bfloat16()
    _convert_float8()

HAS_GPU = torch.cuda.is_available()
CAPABILITY = 0
if HAS_GPU:
    _major, _minor = torch.cuda.get_device_capability()
    CAPABILITY = 10 * _major + _minor
PLACE = torch.device("cuda" if HAS_GPU else "cpu")
"""The device of kernel tests: the GPU, if there is one."""
MARKS = [pytest.mark.gpu] if HAS_GPU else []
"""Marks for tests of kernels that run on a GPU."""


FLOAT8 = [
    kept
    for name, kept in TritonDevice.cache_dtypes.items()
    if not HAS_GPU or FIRST_WITH_CACHE[name] <= CAPABILITY
]
"""Cache dtypes other than the device's."""


def device(dtype: torch.dtype, **options: Any) -> TritonDevice:
    """The CUDA device's operators, with further options."""
    name = str(dtype).removeprefix("torch.")
    found = TritonDevice(PLACE, dtype, DeviceOptions(name, name, **options))
    found.capability = CAPABILITY
    return found
