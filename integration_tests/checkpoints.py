"""Tiny checkpoints of every supported family: real Hugging Face directories with random weights.

Every feature of a family is switched on with a distinct size (head_dim is not hidden / heads where
the family allows it, windows are shorter than the tests' prompts, norms are not ones, biases are
not zeros), so that a forgotten term changes the tokens.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 300
MAX_POSITIONS = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TOKENIZER_TEXT = (
    "the cat sat on the mat and the dog ran in the rain; what is the time, and where is the sun? "
    "def add(first, second):\n    return first + second\n\nprint(add(1, 2))\n"
    "the more there is of the other, the less there is of this and that thing.\n"
)

# The default shape of all families: grouped-query attention.
_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}

_LLAMA3_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
# One factor for each pair of the 12 rotated dimensions: 0.75 of head_dim 16.
_LONGROPE: Mapping[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.4, 1.6],
    "long_factor": [1.0, 1.3, 1.8, 2.5, 4.0, 8.0],
}


@dataclass(frozen=True, slots=True)
class Family:
    """How one kind of checkpoint is written."""

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    old_spelling: bool = False
    """config.json as transformers 4 wrote it: rope_scaling, rope_theta, torch_dtype."""
    adds_bos: bool = False
    """The tokenizer puts a BOS token in front of every text."""
    eos_token_ids: tuple[int, ...] = (0,)
    """The end tokens in generation_config.json; config.json has only the first."""
    max_shard_size: str = "1GB"
    """Files larger than this are split and get an index."""
    raw_fields: Mapping[str, Any] = field(default_factory=dict)
    """Written into config.json unchanged, for fields that transformers itself would not write."""
    without: tuple[str, ...] = ()
    """Removed from config.json, so that the defaults of transformers hold."""
    switch_length: int | None = None
    """Length at which rope changes its frequencies; None: never. No test answer may cross it."""
    flags: tuple[str, ...] = ()
    """The flags of a server for the lengths of the tests."""


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


FAMILIES: Mapping[str, Family] = {
    "llama2": Family(
        "llama",
        {"num_key_value_heads": 4, "tie_word_embeddings": False},
        old_spelling=True,
        adds_bos=True,
    ),
    "llama3": Family(
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE},
        eos_token_ids=(0, 2),
    ),
    "llama3-untied": Family(
        "llama", {"tie_word_embeddings": False, "rope_parameters": _LLAMA3_ROPE, "head_dim": 32}
    ),
    "llama3-old": Family(
        "llama", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE}, old_spelling=True
    ),
    "llama-bias": Family(
        "llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}
    ),
    "llama-linear": Family(
        "llama", {"tie_word_embeddings": False, **_rope(rope_type="linear", factor=3.0)}
    ),
    "llama-dynamic": Family(
        "llama",
        {
            "tie_word_embeddings": False,
            "max_position_embeddings": 64,
            **_rope(rope_type="dynamic", factor=4.0),
        },
        switch_length=64,
    ),
    "llama-yarn": Family("llama", {"tie_word_embeddings": False, "rope_parameters": _YARN_ROPE}),
    "llama-yarn-old": Family(
        "llama", {"tie_word_embeddings": False, "rope_parameters": _YARN_ROPE}, old_spelling=True
    ),
    # Keys of other families, which transformers ignores.
    "llama-stray-keys": Family(
        "llama",
        {"tie_word_embeddings": False},
        raw_fields={
            "partial_rotary_factor": 0.5,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.13,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
        },
    ),
    "llama-own-head": Family(
        "llama",
        {"tie_word_embeddings": False},
        raw_fields={"tie_word_embeddings": True},
    ),
    "llama-sharded": Family("llama", {"tie_word_embeddings": False}, max_shard_size="100KB"),
    "mistral": Family("mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": Family(
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": False, "max_window_layers": 1},
        old_spelling=True,
        raw_fields={"sliding_window": 16},  # like Qwen2.5: named, but switched off
    ),
    "qwen2-sliding": Family(
        "qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    ),
    "qwen3": Family("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    # How YaRN is switched on: `rope_scaling` beside the `rope_parameters` of transformers 5.
    "qwen3-yarn": Family(
        "qwen3",
        {"head_dim": 32, "tie_word_embeddings": True, **_rope(rope_theta=1e6)},
        raw_fields={"rope_scaling": {k: v for k, v in _YARN_ROPE.items() if k != "rope_theta"}},
    ),
    # Rows of one head have gaps between them; the size is no whole number of vectors.
    "qwen3-one-kv-head": Family("qwen3", {"head_dim": 24, "num_key_value_heads": 1}),
    "smollm2": Family(
        "llama", {"tie_word_embeddings": True, "num_hidden_layers": 4, **_rope(rope_theta=1e5)}
    ),
    "smollm3": Family(
        "smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2, **_rope(rope_theta=2e6)}
    ),
    "smollm3-sliding": Family(
        "smollm3",
        {
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 4,
            "use_sliding_window": True,
            "sliding_window": 16,
        },
    ),
    "phi3": Family("phi3", _rope(partial_rotary_factor=0.75)),
    # An odd number of features is rotated, so one more is.
    "phi3-odd-rotation": Family("phi3", {"head_dim": 48, **_rope(partial_rotary_factor=0.4)}),
    "phi3-sliding": Family("phi3", {"sliding_window": 24, "num_key_value_heads": 4}),
    "phi3-longrope": Family(
        "phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
        switch_length=64,
    ),
    "phi3-longrope-old": Family(
        "phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
        old_spelling=True,
        switch_length=64,
    ),
    # Early Phi-3 checkpoints say `yarn`.
    "phi3-yarn": Family(
        "phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
        raw_fields={"rope_parameters": {**_LONGROPE, "rope_type": "yarn"}},
        switch_length=64,
    ),
    "granite": Family(
        "granite",
        {
            "tie_word_embeddings": True,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.13,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
        },
    ),
    # Scores are not divided by the square root of head_dim.
    "granite-plain": Family("granite", without=("attention_multiplier",)),
}


def write_checkpoint(family: str, directory: Path, **overrides: Any) -> Path:
    """Writes a checkpoint of FAMILIES[family] into the directory, which it returns.

    The weights depend on the family's shape alone: two calls write the same bytes. Overrides are
    config.json fields.
    """
    entry = FAMILIES[family]
    directory.mkdir(parents=True, exist_ok=True)
    _write_model(entry, directory, overrides)
    write_tokenizer(directory, entry.adds_bos)
    path = directory / "config.json"
    config = json.loads(path.read_text()) | entry.raw_fields
    for name in entry.without:
        del config[name]
    if entry.old_spelling:
        _respell(config)
    path.write_text(json.dumps(config, indent=2))
    return directory


def damage(source: Path, target: Path, name: str, row: int | None) -> Path:
    """A copy of a checkpoint in which a tensor, or one row of it, is NaN."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    tensors[name][... if row is None else row] = math.nan
    save_file(tensors, path, metadata={"format": "pt"})
    return target


def _write_model(family: Family, directory: Path, overrides: Mapping[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = json.loads(json.dumps({**_SHAPE, **family.config, **overrides}))  # a deep copy
    config = AutoConfig.for_model(family.model_type, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(20_26)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            center = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(center + 0.2 * noise)
    model.generation_config.eos_token_id = list(family.eos_token_ids)
    model.save_pretrained(directory, max_shard_size=family.max_shard_size)


def write_tokenizer(directory: Path, adds_bos: bool = False) -> None:
    """Write a tokenizer of VOCAB_SIZE tokens with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TOKENIZER_TEXT], trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL_TOKENS[0]} $A", special_tokens=[(SPECIAL_TOKENS[0], 0)]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _respell(config: dict[str, Any]) -> None:
    """Writes a config.json like transformers 4 did, the form of most checkpoints on the hub."""
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = rope.pop("rope_theta")
    config["transformers_version"] = "4.43.0"
    config.pop("layer_types", None)
    if config.get("head_dim") == config["hidden_size"] // config["num_attention_heads"]:
        del config["head_dim"]
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    if kind == "default":
        config["rope_scaling"] = None
    else:  # llama3 was the first kind to use `rope_type`
        config["rope_scaling"] = {"rope_type" if kind == "llama3" else "type": kind, **rope}
