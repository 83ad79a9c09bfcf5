"""The shape of a model, read from its directory. No other file reads config.json.

The supported families are rows of differences, and share `models/llama.py`.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from text_generation_shard.checkpoint.files import (
    LARGEST_POSITION,
    Fields,
    read_json,
    read_vocabulary,
)
from text_generation_shard.checkpoint.rope import RopeConfig, read_rope
from text_generation_shard.device.base import Activation, DecoderSizes
from text_generation_shard.errors import ModelError, UnsupportedError

logger = logging.getLogger(__name__)

# More would take minutes to build, before the weights show that they are missing.
_MOST_LAYERS = 10_000
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of a family from Llama, and the defaults of its config.json."""

    model_type: str
    # The defaults of transformers for missing keys.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Query, key and value projections have biases, without `attention_bias`.
    qkv_bias: bool = False
    qk_norm: bool = False
    fused_projections: bool = False
    # `sliding_window` is in effect.
    has_window: bool = False
    # It needs `use_sliding_window`, and starts at layer `max_window_layers`.
    window_is_optional: bool = False
    # Some layers do not rotate.
    has_no_rope_layers: bool = False
    # `partial_rotary_factor` is in effect.
    has_partial_rotary: bool = False
    # Kinds of rope that have another meaning.
    rope_kinds: Mapping[str, str] = field(default_factory=dict)
    # `MULTIPLIERS` are in effect.
    has_multipliers: bool = False


_LLAMA = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048}
_QWEN = {
    **_LLAMA,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)

# Defaults as in the configuration classes of transformers 5.24.
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", _LLAMA),
    "MistralForCausalLM": Family(
        "mistral",
        {
            **_LLAMA,
            "max_position_embeddings": 4096 * 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        has_window=True,
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        _QWEN,
        qkv_bias=True,
        has_window=True,
        window_is_optional=True,
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        {**_QWEN, "head_dim": 128},
        qk_norm=True,
        has_window=True,
        window_is_optional=True,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        {
            "rms_norm_eps": 1e-6,
            "rope_theta": 2000000.0,
            "max_position_embeddings": 32768,
            "no_rope_layer_interval": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        has_window=True,
        window_is_optional=True,
        has_no_rope_layers=True,
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        fused_projections=True,
        has_window=True,
        has_partial_rotary=True,
        rope_kinds={"yarn": "longrope"},
    ),
    "GraniteForCausalLM": Family(
        "granite", {**_LLAMA, **dict.fromkeys(MULTIPLIERS, 1.0)}, has_multipliers=True
    ),
}


@dataclass(frozen=True)
class ModelConfig:
    """What the engine must know of a model of any architecture."""

    architecture: str
    vocab_size: int
    hidden_size: int
    # The longest text, also of a scaled rope.
    max_position: int
    eos_token_ids: tuple[int, ...]
    # Ids that are never chosen, since the tokenizer has no tokens for them: padding.
    unused_ids: tuple[int, ...]
    # Number type the checkpoint was saved in.
    dtype: str


@dataclass(frozen=True)
class LlamaConfig(ModelConfig, DecoderSizes):
    """All differences between the families with Llama's architecture, as data."""

    num_layers: int
    activation: Activation
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

    @classmethod
    def from_hf(
        cls, directory: Path, rope_scaling: str | None = None, rope_factor: float | None = None
    ) -> "LlamaConfig":
        """Read config.json and generation_config.json; ModelError, which names the field, if it can
        not be served."""
        fields = read_fields(directory)
        architecture = _architecture(fields)
        family = FAMILIES[architecture]
        # Missing fields have the family's defaults in transformers.
        fields = Fields({**family.defaults, **fields.values}, fields.where)
        num_layers = fields.size("num_hidden_layers", _MOST_LAYERS)
        num_heads, num_kv_heads, head_dim = _heads(fields)
        uses_rope = _layer_uses_rope(fields, family, num_layers)
        rope = read_rope(
            fields,
            head_dim,
            kinds=family.rope_kinds,
            is_partial=family.has_partial_rotary,
            scaling=rope_scaling,
            factor=rope_factor,
        )
        attention_bias = fields.flag("attention_bias")
        factors = _multipliers(fields, family)
        end_ids, unused_ids = token_ids(fields, directory)
        return cls(
            architecture=architecture,
            vocab_size=fields.size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=fields.number("rms_norm_eps"),
            activation=_activation(fields),
            max_position=rope.context,
            rope=rope,
            layer_uses_rope=uses_rope,
            layer_windows=_layer_windows(fields, family, num_layers, uses_rope),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias and not family.qkv_bias,
            mlp_bias=fields.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            fused_projections=family.fused_projections,
            attention_scale=factors.get("attention_multiplier", head_dim**-0.5),
            embedding_multiplier=factors.get("embedding_multiplier", 1.0),
            residual_multiplier=factors.get("residual_multiplier", 1.0),
            logits_divisor=factors.get("logits_scaling", 1.0),
            eos_token_ids=end_ids,
            unused_ids=unused_ids,
            dtype=checkpoint_dtype(fields),
        )


def read_fields(directory: Path) -> Fields:
    """The fields of config.json; ModelError if they are those of no model that can be served."""
    path = directory / "config.json"
    fields = Fields(read_json(path), str(path))
    if settings := fields.values.get("quantization_config"):
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise ModelError(
            f"the checkpoint is quantized ({method}), as `quantization_config` in {fields.where} "
            "says, which is not supported yet; use the unquantized checkpoint"
        )
    if not fields.find("model_type"):
        raise ModelError(
            f"{fields.where} has no `model_type`; it must be a Hugging Face transformers checkpoint"
        )
    if fields.values.get("is_causal") is False:
        raise ModelError(
            f"this {fields.values['model_type']} has bidirectional attention (is_causal is false "
            "in config.json); only models with causal attention are supported"
        )
    return fields


def _architecture(fields: Fields) -> str:
    model_type = fields.text("model_type")
    architectures = fields.items("architectures", str, 0) if fields.find("architectures") else []
    matches = [key for key, family in FAMILIES.items() if family.model_type == model_type]
    name = next(iter([*architectures, *matches]), f"model_type {model_type}")
    name = _with_head(name, fields.values)
    if name not in FAMILIES:
        raise UnsupportedError(
            f"the architecture {name} is not built in; built in are {', '.join(FAMILIES)}"
        )
    return name


def _with_head(name: str, raw: Mapping[str, Any]) -> str:
    """The architecture with a head for this one: for models without a head, and for rerankers that
    classify by the scores of some tokens."""
    for suffix in ("Model", "ForSequenceClassification"):
        causal = name.removesuffix(suffix) + "ForCausalLM"
        is_ours = suffix == "Model" or raw.get("classifier_from_token")
        if name.endswith(suffix) and causal in FAMILIES and is_ours:
            return causal
    return name


def _heads(fields: Fields) -> tuple[int, int, int]:
    """The heads, the KV heads and the features of each."""
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads") if fields.find("num_key_value_heads") else heads
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of the {heads} attention heads")
    if fields.find("head_dim"):
        return heads, kv_heads, fields.size("head_dim")
    if fields.size("hidden_size") < heads:
        raise fields.wrong("num_attention_heads", "at most `hidden_size`")
    return heads, kv_heads, fields.size("hidden_size") // heads


def _multipliers(fields: Fields, family: Family) -> dict[str, float]:
    """The factors that are in effect."""
    if family.has_multipliers:
        least = {"logits_scaling": 0.0}
        return {name: fields.number(name, least.get(name, -math.inf)) for name in MULTIPLIERS}
    for name in MULTIPLIERS:
        if fields.values.get(name, 1.0) not in (None, 1.0):
            logger.warning("`%s` in %s is ignored: it is Granite's", name, fields.where)
    return {}


def _activation(fields: Fields) -> Activation:
    name = fields.text("hidden_act") if "hidden_act" in fields.values else "silu"
    if name not in _ACTIVATIONS:
        expected = f"one of {', '.join(_ACTIVATIONS)}"
        raise UnsupportedError(str(fields.wrong("hidden_act", expected)))
    return _ACTIVATIONS[name]


def checkpoint_dtype(fields: Fields) -> str:
    """The number type that the checkpoint was saved in."""
    name = fields.find("dtype", "torch_dtype")
    return fields.text(name).removeprefix("torch.") if name else "float32"


def _layer_uses_rope(fields: Fields, family: Family, num_layers: int) -> tuple[bool, ...]:
    if not family.has_no_rope_layers:
        return (True,) * num_layers
    if fields.find("no_rope_layers"):
        # Despite the name, 1 marks a layer that rotates.
        return tuple(map(bool, fields.items("no_rope_layers", int, num_layers)[:num_layers]))
    interval = fields.size("no_rope_layer_interval")
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def _layer_windows(
    fields: Fields, family: Family, num_layers: int, uses_rope: tuple[bool, ...]
) -> tuple[int | None, ...]:
    if not family.has_window or not fields.find("sliding_window"):
        return (None,) * num_layers
    if family.window_is_optional and not fields.flag("use_sliding_window"):
        return (None,) * num_layers
    window = fields.size("sliding_window", LARGEST_POSITION)
    if fields.find("layer_types"):
        types = fields.items("layer_types", str, num_layers)[:num_layers]
        slides = [name == "sliding_attention" for name in types]
    elif family.has_no_rope_layers:
        slides = [not rope for rope in uses_rope]
    elif family.window_is_optional:
        first = fields.size("max_window_layers", least=0)
        slides = [layer >= first for layer in range(num_layers)]
    else:
        slides = [True] * num_layers
    return tuple(window if slide else None for slide in slides)


def token_ids(fields: Fields, directory: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The end tokens, and the ids that are never chosen."""
    vocabulary, size = read_vocabulary(directory), fields.size("vocab_size")
    end_ids = _eos_token_ids(fields, directory, vocabulary.end_id)
    used = vocabulary.ids or range(size)
    return end_ids, tuple(sorted({*range(size)} - {*used, *end_ids}))


def _eos_token_ids(fields: Fields, directory: Path, of_tokenizer: int | None) -> tuple[int, ...]:
    """Those of generation_config.json, or without any those of config.json; and the tokenizer's, so
    that a chat ends where its template ends a message. vLLM does the same."""
    path, name = directory / "generation_config.json", "eos_token_id"
    generation = Fields(read_json(path) if path.exists() else {}, str(path))
    found: list[int] = []
    for place in (generation, fields):
        value = place.values.get(name)
        several = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int for item in several):
            raise place.wrong(name, "a token id or a list of them")
        found = found or several
    if of_tokenizer is not None:
        found = [*found, of_tokenizer]
    known = [item for item in dict.fromkeys(found) if 0 <= item < fields.size("vocab_size")]
    if len(known) < len(set(found)):
        logger.warning("of the end tokens %s the model has only %s", found, known)
    if not known:
        logger.warning(
            "%s: no file names an end token, texts end at a stop sequence or their limit", directory
        )
    return tuple(known)
