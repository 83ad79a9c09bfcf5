"""Rotary position embedding (Su et al. 2021) and its extensions to longer contexts: read from
config.json as transformers reads it, and the angles of positions."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from text_generation_process.defaults import ROPE_FACTOR
from torch import Tensor

from text_generation_shard.checkpoint.files import LARGEST_POSITION, Fields
from text_generation_shard.device.base import Angles, ForwardBatch
from text_generation_shard.errors import ModelError, UnsupportedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: its kind and parameters."""

    kind: str
    theta: float
    # Leading features of each head that are rotated.
    rotary_dim: int
    # The context of the unscaled model.
    original_max_position: int
    # `max_position_embeddings`, from which `dynamic` computes.
    max_position: int
    # The checkpoint's remaining rope entries, by their Hugging Face names.
    parameters: dict[str, Any]

    @property
    def context(self) -> int:
        """The longest text that the scaled model is made for."""
        unscaled = self.original_max_position if self.kind == "yarn" else self.max_position
        scales = self.kind in ("linear", "dynamic", "yarn")
        scaled = int(unscaled * float(self.parameters["factor"])) if scales else 0
        return min(max(self.max_position, scaled), LARGEST_POSITION)


def read_rope(
    config: Fields,
    head_dim: int,
    kinds: Mapping[str, str],
    is_partial: bool,
    scaling: str | None,
    factor: float | None,
) -> RopeConfig:
    """Reads `rope_scaling`, or without it `rope_parameters`; `scaling` and `factor` of the command
    line replace all but their `rope_theta`. kinds: those that have another meaning. is_partial:
    `partial_rotary_factor` is in effect. ModelError names what can not be served."""
    given, other = config.inner("rope_scaling"), config.inner("rope_parameters")
    given, other = (given, other) if given.values else (other, given)
    theta = (given if "rope_theta" in given.values else config).number("rope_theta", 1)
    if other.values.get("rope_theta", theta) != theta:
        logger.warning(
            "%s replaces all of `rope_parameters`, as in transformers: `rope_theta` is %g, not "
            "%s; write the model's `rope_theta` into it",
            given.where,
            theta,
            other.values["rope_theta"],
        )
    if scaling is not None:
        asked = {"rope_type": scaling, "factor": factor or ROPE_FACTOR}
        given = Fields(asked, "--rope-scaling")
    kind = _kind(given, kinds)
    rotary_dim = _rotary_dim(config, given, is_partial, head_dim, kind)
    _check(given, kind, rotary_dim)
    max_position = config.size("max_position_embeddings", LARGEST_POSITION)
    original, name = max_position, "original_max_position_embeddings"
    for place in (given, config):
        original = place.size(name, LARGEST_POSITION) if place.find(name) else original
    return RopeConfig(kind, theta, rotary_dim, original, max_position, dict(given.values))


def _kind(given: Fields, kinds: Mapping[str, str]) -> str:
    name = given.find("rope_type", "type")
    kind = "default" if name is None else given.text(name)
    kind = {"su": "longrope", **kinds}.get(kind, kind)
    if kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise UnsupportedError(str(given.wrong(name or "rope_type", f"one of {known}")))
    return kind


def _rotary_dim(config: Fields, given: Fields, is_partial: bool, head_dim: int, kind: str) -> int:
    name = "partial_rotary_factor"
    place, share = given if name in given.values else config, 1.0
    if name in place.values and (is_partial or place.find(name)):
        share = place.number(name)
    if share != 1.0 and not is_partial:
        # As in transformers, where the other kinds end in an error.
        if kind != "default":
            raise place.wrong(name, f"none: this model can not rotate parts of heads with {kind}")
        logger.warning("`%s` in %s is ignored: this model rotates whole heads", name, place.where)
        share = 1.0
    dim = int(head_dim * share)
    # Features rotate in pairs: of an odd number, the last has the next feature as its partner.
    if not (3 if kind == "dynamic" else 1) <= dim <= dim + dim % 2 <= head_dim:
        raise ModelError(
            f"{config.where} rotates {dim} of the {head_dim} features of a head (`head_dim`, "
            f"`{name}`); expected pairs of features within the head"
        )
    return dim


def _check(given: Fields, kind: str, rotary_dim: int) -> None:
    """ModelError if a number is missing or wrong."""
    found = [name for name in _KINDS[kind].optional if given.values.get(name) not in (None, 0)]
    for name in (*_KINDS[kind].needed, *found):
        given.number(name)
    if kind == "llama3" and given.number("high_freq_factor") <= given.number("low_freq_factor"):
        raise given.wrong("high_freq_factor", "a number above `low_freq_factor`")
    if kind == "longrope":
        pairs = -(-rotary_dim // 2)
        for name in ("short_factor", "long_factor"):
            if len(given.items(name, float, pairs)) != pairs:
                raise given.wrong(name, f"a list of {pairs} numbers")


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
        self._frequencies, self._scale = _KINDS[config.kind].frequencies(config, base)
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


class _Kind(NamedTuple):
    """The frequencies of a kind of rope and the scale of its angles; the numbers that it needs, and
    those that may be missing, null or 0."""

    frequencies: Callable[[RopeConfig, Tensor], tuple[Tensor, float]]
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_KINDS: Mapping[str, _Kind] = {
    "default": _Kind(_plain),
    "linear": _Kind(_linear, ("factor",)),
    "dynamic": _Kind(_plain, ("factor",)),
    "llama3": _Kind(_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
    "yarn": _Kind(
        _yarn,
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
    "longrope": _Kind(_longrope, (), ("factor", "attention_factor")),
}
