"""CPU kernels, compiled by numba from Python. `are_used` selects the models that they serve;
`compile.prepare` must be called first.
"""

from typing import Any, NamedTuple

import torch

from text_generation_shard.device.cpu.kernels.processor import are_vectors_wide as are_vectors_wide

MAX_HEAD_DIM = 256
"""Most features of a head in `attention`."""


class WeightAddress(NamedTuple):
    """A packed weight: its kind (a marker of `vector`), its address and that of its scales (0:
    none), and the number of parts of its sums."""

    kind: Any
    weight: int
    scales: int
    num_parts: int = 1


def are_used(dtype: torch.dtype) -> bool:
    """Whether these kernels compute models of this dtype."""
    return dtype in (torch.bfloat16, torch.float32)
