"""Rotary position embedding in torch."""

import torch
from torch import Tensor

from text_generation_shard.device.forward import Angles


class TorchRotation:
    """Rotates the heads of T tokens. Holds each angle twice, the first half of the sines negated,
    so that a rotation takes three operators."""

    def __init__(self, angles: Angles, dtype: torch.dtype) -> None:
        cos, sin = angles.table[angles.rows].unbind(dim=1)
        # [T, 1, rotary_dim]
        self._cos = torch.cat((cos, cos), dim=-1)[:, None].to(dtype)
        self._sin = torch.cat((-sin, sin), dim=-1)[:, None].to(dtype)

    def rotate_(self, heads: Tensor, num_rotated: int, num_queries: int, scale: float) -> None:
        """Rotate the first `num_rotated` heads of [T, n, head_dim] in place: feature i with feature
        i + half. The first `num_queries` heads are multiplied by `scale`."""
        rotary_dim = self._cos.shape[-1]
        rotated = heads[:, :num_rotated, :rotary_dim]
        swapped = rotated.roll(rotary_dim // 2, dims=-1)
        torch.addcmul(rotated * self._cos, swapped, self._sin, out=rotated)
        heads[:, :num_queries].mul_(scale)
