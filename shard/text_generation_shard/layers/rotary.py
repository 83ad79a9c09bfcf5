"""Rotary position embedding (Su et al. 2021) and the ways it was stretched to longer contexts."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from text_generation_shard.device.cpu import kernels
from text_generation_shard.models.config import RopeConfig


class RotaryEmbedding:
    """Angles for positions. Frequencies are fixed, or follow a row's length (dynamic, longrope).

    `length_rule` says which length those kinds go by, so that a token's rotation depends on its
    own request alone, never on what else is in the batch:
    `prompt`: the prompt's length for prompt tokens, position + 1 afterwards (dynamic);
    `total`: the row's length, and when it passes the original context the row is computed anew
    (longrope); None: no length matters.
    """

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self._config = config
        self._exponents = (
            torch.arange(0, config.rotary_dim, 2, dtype=torch.int64, device=device).float()
            / config.rotary_dim
        )
        base = config.theta**self._exponents
        self._frequencies, self._scale = _FREQUENCIES[config.kind](config, base)
        self._long_frequencies: Tensor | None = None
        if config.kind == "longrope":
            self._long_frequencies = 1.0 / (_factors(config, "long_factor", device) * base)
        self.length_rule = {"dynamic": "prompt", "longrope": "total"}.get(config.kind)
        # See `table`.
        self._known, self._num_known = torch.empty(0), 0

    @property
    def recompute_at(self) -> int | None:
        """A row that grows beyond so many tokens must be computed anew; None: never."""
        return self._config.original_max_position if self._config.kind == "longrope" else None

    @property
    def prompt_scaled_at(self) -> int | None:
        """A prompt of more tokens is rotated by how many it has; None: none ever is."""
        return self._config.max_position if self.length_rule == "prompt" else None

    def __call__(
        self, positions: Tensor, rope_lens: Tensor | None, dtype: torch.dtype, end: int
    ) -> "Rotation":
        """What turns heads at positions [T], all of them below `end`."""
        uses_kernels = kernels.are_used(dtype, positions.device)
        if uses_kernels and rope_lens is None:
            return KernelRotation(self.table(end), positions)
        frequencies = self._frequencies
        if self._long_frequencies is not None and rope_lens is not None:
            is_long = rope_lens > self._config.original_max_position
            frequencies = torch.where(is_long[:, None], self._long_frequencies, frequencies)
        elif self.length_rule == "prompt" and rope_lens is not None:
            frequencies = self._dynamic(rope_lens)
        cos, sin = self._turns(positions, frequencies)
        if uses_kernels:
            return KernelRotation(torch.stack((cos, sin), dim=1), torch.arange(len(positions)))
        return TorchRotation(
            torch.cat((cos, cos), dim=-1)[:, None].to(dtype),
            torch.cat((-sin, sin), dim=-1)[:, None].to(dtype),
        )

    def _turns(self, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, rotary_dim / 2], scaled."""
        angles = positions.float()[:, None] * frequencies
        return angles.cos() * self._scale, angles.sin() * self._scale

    def table(self, end: int) -> Tensor:
        """What positions from 0 to `end` at least turn by, where lengths do not matter, in float32:
        [*, 2, rotary_dim / 2], cosines and sines. It grows by doubling: 8 bytes for each position
        and pair of features. Seven operators on a handful of numbers took 0.17 ms of a decode step,
        in caches that the weights have just swept."""
        if self._num_known < end:
            positions = torch.arange(max(1024, 1 << (end - 1).bit_length()))
            self._known = torch.stack(self._turns(positions, self._frequencies), dim=1)
            self._num_known = len(positions)
        return self._known

    def _dynamic(self, rope_lens: Tensor) -> Tensor:
        """NTK-aware scaling that grows with the length: [T, rotary_dim / 2]."""
        factor = float(self._config.parameters["factor"])
        dim, limit = self._config.rotary_dim, self._config.max_position
        ratio = factor * rope_lens.clamp(min=limit).double() / limit - (factor - 1)
        theta = (self._config.theta * ratio ** (dim / (dim - 2))).float()
        return 1.0 / theta[:, None] ** self._exponents


class Rotation(Protocol):
    """Turns the heads of T tokens by the angles of their positions."""

    def turn_(self, heads: Tensor, num_turning: int, num_queries: int, scale: float) -> None:
        """Rotate the first `num_turning` of heads [T, n, head_dim], contiguous, in place; the first
        `num_queries` of them are multiplied by `scale`."""


class TorchRotation:
    """cos and sin [T, 1, rotary_dim] hold each angle twice, the first half of sin negated, so that
    three operators do it. A pair is (feature i, feature i + half)."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos, self._sin = cos, sin

    def turn_(self, heads: Tensor, num_turning: int, num_queries: int, scale: float) -> None:
        """See Rotation."""
        rotary_dim = self._cos.shape[-1]
        turning = heads[:, :num_turning, :rotary_dim]
        swapped = turning.roll(rotary_dim // 2, dims=-1)
        torch.addcmul(turning * self._cos, swapped, self._sin, out=turning)
        heads[:, :num_queries].mul_(scale)


class KernelRotation:
    """The same by one kernel: by those of the angles [*, 2, rotary_dim / 2], in float32, that lie
    at positions [T]."""

    def __init__(self, angles: Tensor, positions: Tensor) -> None:
        self.angles, self.positions = angles, positions

    def turn_(self, heads: Tensor, num_turning: int, num_queries: int, scale: float) -> None:
        """See Rotation."""
        from text_generation_shard.device.cpu.kernels.pointwise import rotate_

        rotate_(heads, num_turning, num_queries, scale, self.angles, self.positions)


def _plain(config: RopeConfig, base: Tensor) -> tuple[Tensor, float]:
    return 1.0 / base, 1.0


def _linear(config: RopeConfig, base: Tensor) -> tuple[Tensor, float]:
    return 1.0 / base / float(config.parameters["factor"]), 1.0


def _llama3(config: RopeConfig, base: Tensor) -> tuple[Tensor, float]:
    """Llama 3.1: stretch long wavelengths, keep short ones, blend between."""
    factor = float(config.parameters["factor"])
    low = float(config.parameters["low_freq_factor"])
    high = float(config.parameters["high_freq_factor"])
    frequencies = 1.0 / base
    wavelengths = 2 * math.pi / frequencies
    blend = (config.original_max_position / wavelengths - low) / (high - low)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies, 1.0


def _yarn(config: RopeConfig, base: Tensor) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, scale attention."""
    given: Mapping[str, Any] = config.parameters
    dim, length = config.rotary_dim, config.original_max_position
    factor = float(given.get("factor") or config.max_position / length)

    def dimension(rotations: float) -> float:
        return (dim * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(config.theta))

    low = dimension(float(given.get("beta_fast") or 32))
    high = dimension(float(given.get("beta_slow") or 1))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = torch.arange(dim // 2, dtype=torch.float32, device=base.device) - low
    ramp = (ramp / ((high - low) or 0.001)).clamp(0, 1)
    frequencies = ramp / (factor * base) + (1 - ramp) / base
    return frequencies, _yarn_scale(given, factor)


def _yarn_scale(given: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(float(given["mscale"])) / mscale(float(given["mscale_all_dim"]))
    return mscale(1.0)


def _longrope(config: RopeConfig, base: Tensor) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): one factor per dimension, a set for short and one for long."""
    given = config.parameters
    frequencies = 1.0 / (_factors(config, "short_factor", base.device) * base)
    if given.get("attention_factor") is not None:
        return frequencies, float(given["attention_factor"])
    factor = float(given.get("factor") or config.max_position / config.original_max_position)
    if factor <= 1.0:
        return frequencies, 1.0
    return frequencies, math.sqrt(1 + math.log(factor) / math.log(config.original_max_position))


def _factors(config: RopeConfig, name: str, device: torch.device) -> Tensor:
    return torch.tensor(config.parameters[name], dtype=torch.float32, device=device)


_FREQUENCIES: Mapping[str, Callable[[RopeConfig, Tensor], tuple[Tensor, float]]] = {
    "default": _plain,
    "dynamic": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
