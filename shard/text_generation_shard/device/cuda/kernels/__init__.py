"""Triton kernels. Each reads its inputs once, accumulates in float32, and gives a row the same bits
whatever else is in the batch.

Nothing is tuned at run time: sizes of tiles are in `tiles`, so that a start compiles what the last
one did. Nor is anything compiled for a number that changes from step to step, which would hold up
the step that has a new one (`do_not_specialize`). Under TRITON_INTERPRET=1 all run on the CPU.
"""

from collections.abc import Sequence
from typing import Any


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
    """Start one kernel. Every kernel is started here and nowhere else: what counts them counts
    here."""
    if all(grid):
        kernel[tuple(grid)](*arguments, **options)
