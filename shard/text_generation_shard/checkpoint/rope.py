"""How a model rotates its positions, read from config.json as transformers reads it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from text_generation_process.defaults import ROPE_FACTOR

from text_generation_shard.checkpoint.fields import LARGEST_POSITION, Fields
from text_generation_shard.errors import ModelError, UnsupportedError

logger = logging.getLogger(__name__)

# By kind: the numbers that it needs, and those that may be missing, null or 0.
_NUMBERS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
    "longrope": ((), ("factor", "attention_factor")),
}


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
    if kind not in _NUMBERS:
        known = ", ".join(_NUMBERS)
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
    needed, optional = _NUMBERS[kind]
    for name in (*needed, *(name for name in optional if given.values.get(name) not in (None, 0))):
        given.number(name)
    if kind == "llama3" and given.number("high_freq_factor") <= given.number("low_freq_factor"):
        raise given.wrong("high_freq_factor", "a number above `low_freq_factor`")
    if kind == "longrope":
        pairs = -(-rotary_dim // 2)
        for name in ("short_factor", "long_factor"):
            if len(given.items(name, float, pairs)) != pairs:
                raise given.wrong(name, f"a list of {pairs} numbers")
