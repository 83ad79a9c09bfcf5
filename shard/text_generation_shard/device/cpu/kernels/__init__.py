"""The processor's own kernels: compiled by numba from Python, for what torch is slow at there.

`are_used` says for which models; `compile.prepare` comes before all else.
"""

from typing import Any, NamedTuple

import torch

from text_generation_shard.device.cpu.kernels.processor import are_vectors_wide as are_vectors_wide

MAX_HEAD_DIM = 256
"""Features of a head at most, for `attention`."""


class WeightAddress(NamedTuple):
    """Where a packed weight lies: what kind its numbers are (a marker of `vector`), its address and
    that of its scales (0: it has none), how many bytes it takes without them, and in how many parts
    its sums are taken."""

    kind: Any
    weight: int
    scales: int
    nbytes: int
    num_parts: int = 1


def are_used(dtype: torch.dtype) -> bool:
    """Whether models of this kind are computed by these kernels, not by torch's operators."""
    return dtype in (torch.bfloat16, torch.float32)
