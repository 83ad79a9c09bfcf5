"""The tokenizer, and the files of the finished checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM

from embedded_model.corpus import Entry, source_files
from embedded_model.dialogue import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    QUESTIONS,
    SPECIAL_TOKENS,
    TURN_END,
)

VOCABULARY_SIZE = 4096
SOURCE_EVERY = 4
"""The vocabulary is made from one of this many source files: answers matter more than source."""


def train_tokenizer(entries: list[Entry]) -> Tokenizer:
    """A byte-level BPE of 4,096 tokens, learnt from the answers and a share of the source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [
        f"{QUESTIONS[index % len(QUESTIONS)].format(name=entry.name)}\n{entry.answer}"
        for index, entry in enumerate(entries)
    ]
    texts += [text for _, text in source_files()[::SOURCE_EVERY]]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer doesn't know {token}")
    return found


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and the configuration that transformers reads beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read a tokenizer back."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint: bfloat16 weights without the tied head, and the configurations."""
    save_tokenizer(tokenizer, folder)
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"
    }
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    # It is written for its owner alone, yet has to be readable wherever it is installed.
    file.chmod(0o644)
    shape = model.config
    end_of_text = token_id(tokenizer, END_OF_TEXT)
    ids = {
        "bos_token_id": end_of_text,
        "eos_token_id": [token_id(tokenizer, TURN_END), end_of_text],
        "pad_token_id": end_of_text,
    }
    _write(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_hidden_layers,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "head_dim": shape.hidden_size // shape.num_attention_heads,
            "hidden_act": "silu",
            "max_position_embeddings": shape.max_position_embeddings,
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": shape.initializer_range,
            "use_cache": True,
            **ids,
        },
    )
    _write(folder / "generation_config.json", ids)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
