"""The shape of a model, read from its directory. No other file reads config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text_generation_process.defaults import ROPE_FACTOR

from text_generation_shard.checkpoint.families import FAMILIES, Family
from text_generation_shard.device.base import DecoderSizes
from text_generation_shard.errors import ModelError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: its kind and parameters."""

    kind: str
    theta: float
    # Leading features of each head that are rotated.
    rotary_dim: int
    # The context of the unscaled model.
    original_max_position: int
    # The context of the scaled model.
    max_position: int
    # The checkpoint's remaining rope entries, by their Hugging Face names.
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelConfig(DecoderSizes):
    """All differences between the supported families, as data."""

    architecture: str
    num_layers: int
    hidden_act: str
    max_position: int
    rope: RopeConfig
    # Per layer: whether it rotates, and its attention window (None: the whole context).
    layer_uses_rope: tuple[bool, ...]
    layer_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    # Whether each query and key head is normalized before it is rotated.
    qk_norm: bool
    # The checkpoint stores q, k, v (and gate, up) as one matrix.
    fused_projections: bool
    eos_token_ids: tuple[int, ...]
    # Number type the checkpoint was saved in.
    dtype: str

    @classmethod
    def from_hf(
        cls, directory: Path, rope_scaling: str | None = None, rope_factor: float | None = None
    ) -> "ModelConfig":
        """Read config.json and generation_config.json; ModelError if it can not be served."""
        raw = _read_json(directory / "config.json")
        architecture = _architecture(raw, directory)
        family = FAMILIES[architecture]
        if raw.get("quantization_config"):
            method = raw["quantization_config"].get("quant_method", "unknown")
            raise ModelError(
                f"the checkpoint in {directory} is quantized ({method}), which is not supported "
                "yet; use the unquantized checkpoint"
            )
        try:
            return _from_raw(cls, raw, architecture, family, directory, rope_scaling, rope_factor)
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ModelError(
                f"config.json in {directory} does not describe a {architecture}: {error!s} is "
                "missing or of the wrong type"
            ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}; a model directory needs config.json, "
            "tokenizer.json and *.safetensors"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can not be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return data


def _architecture(raw: dict[str, Any], directory: Path) -> str:
    if not raw.get("model_type"):
        raise ModelError(
            f"config.json in {directory} has no `model_type`; it must be a Hugging Face "
            "transformers checkpoint"
        )
    architectures = raw.get("architectures") or []
    name = str(architectures[0]) if architectures else f"model_type {raw['model_type']}"
    if not architectures:
        matches = [
            key for key, family in FAMILIES.items() if family.model_type == raw["model_type"]
        ]
        name = matches[0] if matches else name
    name = _with_head(name, raw)
    if name not in FAMILIES:
        raise ModelError(
            f"the architecture {name} is not supported; supported are {', '.join(FAMILIES)}"
        )
    return name


def _with_head(name: str, raw: dict[str, Any]) -> str:
    """The architecture with a head for this one: for models without a head, and for rerankers that
    classify by the scores of some tokens."""
    if raw.get("is_causal") is False:
        raise ModelError(
            f"this {name} has bidirectional attention (is_causal is false in config.json); only "
            "models with causal attention are supported"
        )
    for suffix in ("Model", "ForSequenceClassification"):
        causal = name.removesuffix(suffix) + "ForCausalLM"
        is_ours = suffix == "Model" or raw.get("classifier_from_token")
        if name.endswith(suffix) and causal in FAMILIES and is_ours:
            return causal
    return name


def _from_raw(
    cls: type[ModelConfig],
    raw: dict[str, Any],
    architecture: str,
    family: Family,
    directory: Path,
    rope_scaling: str | None,
    rope_factor: float | None,
) -> ModelConfig:
    # Missing keys have the family's defaults in transformers.
    raw = {**family.defaults, **raw}
    num_layers = int(raw["num_hidden_layers"])
    num_heads = int(raw["num_attention_heads"])
    hidden_size = int(raw["hidden_size"])
    head_dim = int(raw.get("head_dim") or hidden_size // num_heads)
    uses_rope = _layer_uses_rope(raw, family, num_layers)
    rope = _rope(raw, head_dim, directory, rope_scaling, rope_factor)
    attention_bias = bool(raw.get("attention_bias", False))
    return cls(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        norm_eps=float(raw["rms_norm_eps"]),
        hidden_act=str(raw.get("hidden_act", "silu")),
        max_position=int(raw["max_position_embeddings"]),
        rope=rope,
        rotary_dim=rope.rotary_dim,
        layer_uses_rope=uses_rope,
        layer_windows=_layer_windows(raw, family, num_layers, uses_rope),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias and not family.qkv_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        fused_projections=family.fused_projections,
        attention_scale=float(raw.get("attention_multiplier") or head_dim**-0.5),
        embedding_multiplier=float(raw.get("embedding_multiplier", 1.0)),
        residual_multiplier=float(raw.get("residual_multiplier", 1.0)),
        logits_divisor=float(raw.get("logits_scaling", 1.0)),
        eos_token_ids=_eos_token_ids(raw, directory),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _rope(
    raw: dict[str, Any],
    head_dim: int,
    directory: Path,
    rope_scaling: str | None,
    rope_factor: float | None,
) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta`."""
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if rope_scaling is not None:
        # The command line replaces the scaling, not `rope_theta`.
        parameters = {
            "rope_type": rope_scaling,
            "factor": rope_factor or ROPE_FACTOR,
            **{key: parameters[key] for key in ("rope_theta",) if key in parameters},
        }
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    kind = "longrope" if kind == "su" else kind
    if kind not in ROPE_TYPES:
        raise ModelError(
            f"the rope type {kind} in {directory}/config.json is not supported; supported are "
            f"{', '.join(ROPE_TYPES)}"
        )
    max_position = int(raw["max_position_embeddings"])
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    original = (
        raw.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or max_position
    )
    return RopeConfig(
        kind=kind,
        theta=float(parameters.get("rope_theta") or raw["rope_theta"]),
        rotary_dim=int(head_dim * float(partial)),
        original_max_position=int(original),
        max_position=max_position,
        parameters=parameters,
    )


def _layer_uses_rope(raw: dict[str, Any], family: Family, num_layers: int) -> tuple[bool, ...]:
    if not family.has_no_rope_layers:
        return (True,) * num_layers
    if (flags := raw.get("no_rope_layers")) is not None:
        # Despite the name, 1 marks a layer that rotates.
        return tuple(bool(flag) for flag in flags[:num_layers])
    interval = int(raw["no_rope_layer_interval"])
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def _layer_windows(
    raw: dict[str, Any], family: Family, num_layers: int, uses_rope: tuple[bool, ...]
) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if not family.has_window or window is None:
        return (None,) * num_layers
    if family.window_is_optional and not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    if (types := raw.get("layer_types")) is not None:
        slides = [name == "sliding_attention" for name in types[:num_layers]]
    elif family.has_no_rope_layers:
        slides = [not rope for rope in uses_rope]
    elif family.window_is_optional:
        first = int(raw["max_window_layers"])
        slides = [layer >= first for layer in range(num_layers)]
    else:
        slides = [True] * num_layers
    return tuple(int(window) if slide else None for slide in slides)


def _eos_token_ids(raw: dict[str, Any], directory: Path) -> tuple[int, ...]:
    """From generation_config.json, else from config.json; one id or a list."""
    path = directory / "generation_config.json"
    value = _read_json(path).get("eos_token_id") if path.exists() else None
    value = raw.get("eos_token_id") if value is None else value
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)
