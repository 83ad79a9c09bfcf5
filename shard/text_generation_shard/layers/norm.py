"""Root-mean-square normalisation (Zhang & Sennrich 2019)."""

import torch
from torch import Tensor

from text_generation_shard.weights import Parameters


class RMSNorm:
    """x / rms(x) · weight over the last dimension; the mean is taken in float32."""

    def __init__(self, parameters: Parameters, name: str, size: int, eps: float) -> None:
        self.weight = parameters.add(f"{name}.weight", (size,))
        self._eps = eps

    def __call__(self, hidden: Tensor) -> Tensor:
        """Same shape and dtype as `hidden`."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return self.weight * wide.to(hidden.dtype)
