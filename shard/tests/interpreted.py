"""Triton's interpreter: kernels for a GPU, run by numpy on the processor.

`conftest` has asked for it, where there is no GPU. On a machine with one nothing is changed here.
"""

import os
from typing import Any

import numpy as np
import torch
import triton.language as tl
from text_generation_shard.device.base import Device, DeviceOptions
from text_generation_shard.device.cuda.operators import TritonDevice
from triton.runtime import interpreter


def _multiply_bfloat16() -> None:
    """`tl.dot` multiplies the bits of bfloat16 as integers there (triton issue 11584): give it
    float32, which holds every bfloat16."""
    plain = interpreter.InterpreterBuilder.create_dot

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar is not tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, left: Any, right: Any, *others: Any) -> Any:
        return plain(self, wide(left), wide(right), *others)

    interpreter.InterpreterBuilder.create_dot = create_dot


if "TRITON_INTERPRET" in os.environ:
    _multiply_bfloat16()


def device(dtype: torch.dtype) -> Device:
    """The CUDA device's operators, on the processor."""
    name = str(dtype).removeprefix("torch.")
    return TritonDevice(torch.device("cpu"), dtype, DeviceOptions(name, name))
