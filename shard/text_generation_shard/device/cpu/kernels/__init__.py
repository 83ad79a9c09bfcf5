"""The processor's own kernels: compiled by numba from Python, for what torch is slow at there.

`are_used` says for which models. Everything else in this package imports numba, which takes a
quarter of a second, and so is imported late.
"""

import logging
from typing import Any, NamedTuple

import torch

from text_generation_shard.device.cpu.kernels.processor import are_vectors_wide as are_vectors_wide

logger = logging.getLogger(__name__)

MAX_HEAD_DIM = 256
"""Features of a head at most, for `attention`."""

# Reading what was compiled before takes less.
_COMPILED_S = 2.0


class Place(NamedTuple):
    """Where a packed weight lies: what kind its numbers are (a marker of `vector`), its address and
    that of its scales (0: it has none), and how many bytes it takes without them."""

    kind: Any
    weight: int
    scales: int
    nbytes: int


def are_used(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether models of this kind are computed by these kernels, not by torch's operators."""
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)


def prepare(dtype: torch.dtype, quantize: str | None, num_threads: int, free_bytes: int) -> None:
    """Have every kernel ready; those that the calling thread starts use so many threads, or as many
    as the process has cores if that is less. free_bytes: memory that processes may take which help
    compiling."""
    import numba

    from text_generation_shard.device.cpu.kernels.compile import compile_all

    num_threads = min(num_threads, numba.config.NUMBA_NUM_THREADS)
    # Processes are copied there, which those that have threads for kernels survive as copies only.
    seconds = compile_all(dtype, quantize, num_threads, free_bytes)
    numba.set_num_threads(num_threads)
    if seconds > _COMPILED_S:
        logger.info(
            "compiled the kernels for this processor in %.0f s; they are kept for the next start",
            seconds,
        )
