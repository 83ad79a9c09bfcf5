"""Rotary position embedding (Su et al. 2021) and its extensions to longer contexts."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from text_generation_shard.checkpoint.rope import RopeConfig
from text_generation_shard.device.forward import Angles, ForwardBatch


class RotaryEmbedding:
    """Angles of positions. Frequencies are fixed, or depend on a row's length (dynamic, longrope).

    `length_rule` defines that length, so that a token's rotation depends on its own request alone,
    regardless of batch composition:
    `prompt`: the prompt's length for prompt tokens, position + 1 for others (dynamic);
    `total`: the row's length; a row that outgrows the original context is recomputed (longrope);
    None: frequencies are fixed.
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
        is_long, is_dynamic = config.kind == "longrope", config.kind == "dynamic"
        self.recompute_at = config.original_max_position if is_long else None
        """A row that grows beyond this many tokens must be recomputed; None: never."""
        self.prompt_scaled_at = config.max_position if is_dynamic else None
        """The rotation of a longer prompt depends on its length; None: never."""
        # See `table`.
        self._known, self._num_known = torch.empty(0), 0

    def angles(self, batch: ForwardBatch) -> Angles:
        """The angles of the tokens of a pass."""
        lens = batch.rope_lens
        if lens is None:
            return Angles(self.table(max(batch.host_context_lens)), batch.positions)
        if self._long_frequencies is not None:
            is_long = lens > self._config.original_max_position
            frequencies = torch.where(is_long[:, None], self._long_frequencies, self._frequencies)
        else:
            frequencies = self._dynamic(lens)
        index = torch.arange(len(batch.positions), device=lens.device)
        return Angles(self._rotated(batch.positions, frequencies), index)

    def table(self, end: int) -> Tensor:
        """The angles of positions [0, end) or more, with fixed frequencies: see `Angles`. It grows
        by doubling, and takes 8 bytes per position and pair of features."""
        if self._num_known < end:
            count = max(1024, 1 << (end - 1).bit_length())
            positions = torch.arange(count, device=self._frequencies.device)
            self._known = self._rotated(positions, self._frequencies)
            self._num_known = count
        return self._known

    def _rotated(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        """Cosines and sines [T, 2, rotary_dim / 2], scaled."""
        angles = positions.float()[:, None] * frequencies
        return torch.stack((angles.cos() * self._scale, angles.sin() * self._scale), dim=1)

    def _dynamic(self, rope_lens: Tensor) -> Tensor:
        """Frequencies of NTK-aware scaling that grows with the length: [T, rotary_dim / 2]."""
        factor = float(self._config.parameters["factor"])
        dim, limit = self._config.rotary_dim, self._config.max_position
        ratio = factor * rope_lens.clamp(min=limit).double() / limit - (factor - 1)
        theta = (self._config.theta * ratio ** (dim / (dim - 2))).float()
        return 1.0 / theta[:, None] ** self._exponents


def _plain(config: RopeConfig, base: Tensor) -> tuple[Tensor, float]:
    return 1.0 / base, 1.0


def _linear(config: RopeConfig, base: Tensor) -> tuple[Tensor, float]:
    return 1.0 / base / float(config.parameters["factor"]), 1.0


def _llama3(config: RopeConfig, base: Tensor) -> tuple[Tensor, float]:
    """Llama 3.1: scale long wavelengths, keep short ones, blend between."""
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
    """LongRoPE (Ding et al. 2024): a factor per dimension, one set for short and one for long
    rows."""
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
