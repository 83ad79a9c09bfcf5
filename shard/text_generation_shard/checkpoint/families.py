"""The supported families: each is one row of differences, and all share `models/llama.py`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
