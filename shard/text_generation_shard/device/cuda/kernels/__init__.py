"""Triton kernels. Each reads its inputs once and accumulates in float32. A row's result is bit for
bit independent of the rest of the batch.

Nothing is tuned at run time: `attention` and `matrices` have tables of tile sizes, so that every
start compiles the same kernels. Arguments that change from step to step are not specialized
(`do_not_specialize`), because a new value would delay its step by a compilation. With
TRITON_INTERPRET=1 all kernels run on the CPU.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def launch(kernel: Any, grid: Sequence[int], arguments: Sequence[Any], **options: Any) -> None:
    """Launch a kernel. Kernels take all tensors as contiguous. All launches go through this
    function, so that tests can count them."""
    for given in arguments:
        if type(given) is Tensor and not given.is_contiguous():
            raise AssertionError(f"{tuple(given.shape)} has strides {given.stride()}")
    if all(grid):
        kernel[tuple(grid)](*arguments, **options)
