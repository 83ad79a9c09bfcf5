"""Writes the checkpoints of the benchmarks: Llamas with random weights in bfloat16.

Run as a script it writes one of 125 M parameters, with the shape of SmolLM2-135M and a smaller
vocabulary. The tokenizer is byte-level BPE in which every word " abc" of three lower-case letters
is one token. So n such words are exactly n tokens, and nearly every token of a random model has
text of its own.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 32_768
END_OF_TEXT = "<|endoftext|>"
PHRASE_TOKENS = 24
# Standard deviation of the weights.
_SPREAD = 0.04


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model of Llama's shape."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = VOCAB_SIZE
    """May be larger than the tokenizer's: the other tokens have no text."""
    is_tied: bool = True


SMALL = Shape(576, 1_536, 30, 9, 3, 64)


def config_of(shape: Shape) -> dict[str, Any]:
    """The config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.is_tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def main() -> None:
    """Writes the directory given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--repeating",
        action="store_true",
        help=f"a model that says the same phrase of {PHRASE_TOKENS} tokens over and over",
    )
    options = parser.parse_args()
    write_checkpoint(options.directory, is_repeating=options.repeating)


def ensure_checkpoint(
    directory: Path,
    *,
    is_repeating: bool = False,
    num_layers: int | None = None,
    shape: Shape = SMALL,
) -> None:
    """Writes it unless it is there."""
    if not (directory / "config.json").exists():
        write_checkpoint(directory, is_repeating=is_repeating, num_layers=num_layers, shape=shape)


def write_checkpoint(
    directory: Path,
    *,
    is_repeating: bool = False,
    num_layers: int | None = None,
    shape: Shape = SMALL,
    device: str = "cpu",
    is_split: bool = False,
) -> None:
    """Writes config, weights and tokenizer; always the same bytes on one kind of device.

    num_layers: instead of the shape's. is_split: one file per layer, so that only one layer is in
    memory; excludes `is_repeating`.
    """
    assert not (is_split and is_repeating), "the layers of a repeating model are changed together"
    shape = replace(
        shape,
        layers=num_layers or shape.layers,
        is_tied=shape.is_tied and not is_repeating,
    )
    directory.mkdir(parents=True, exist_ok=True)
    parts = _weights(shape, torch.Generator(device).manual_seed(125))
    if is_split:
        _save_parts(directory, parts)
    else:
        weights = {name: weight for part in parts for name, weight in part.items()}
        if is_repeating:
            _make_repeating(weights)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(config_of(shape), indent=2))


def _save_parts(directory: Path, parts: Iterator[dict[str, torch.Tensor]]) -> None:
    """Writes one file per part, and the index."""
    places: dict[str, str] = {}
    for number, part in enumerate(parts):
        name = f"model-{number:05d}.safetensors"
        save_file(part, directory / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(directory: Path, num_tokens: int = VOCAB_SIZE) -> None:
    """Writes the tokenizer and its settings."""
    _tokenizer(num_tokens).save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _weights(shape: Shape, generator: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
    """The embeddings, each layer, then norm and head."""
    hidden = shape.hidden
    inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, device=generator.device)
        return (_SPREAD * values).bfloat16().cpu()

    yield {"model.embed_tokens.weight": matrix(shape.vocab, hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield {
            f"{prefix}.self_attn.q_proj.weight": matrix(inner, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, inner),
            f"{prefix}.mlp.gate_proj.weight": matrix(shape.intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(shape.intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, shape.intermediate),
            f"{prefix}.input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        }
    last = {"model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}
    if not shape.is_tied:
        last["lm_head.weight"] = matrix(shape.vocab, hidden)
    yield last


def _make_repeating(weights: dict[str, torch.Tensor]) -> None:
    """Makes the next token a function of the last one: the next in its phrase, cyclically.

    The layers still compute but add zero, so that the hidden state is the token's embedding. The
    head's row of each token is the embedding of its predecessor.
    """
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    tokens = torch.arange(VOCAB_SIZE)
    is_first = tokens % PHRASE_TOKENS == 0
    before = torch.where(is_first, tokens + PHRASE_TOKENS - 1, tokens - 1) % VOCAB_SIZE
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"][before].clone()


def _tokenizer(num_tokens: int) -> Tokenizer:
    """Merges in order of preference: " a", " ab", " abc", then "ab" and "abc" until it is full."""
    pieces = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for start, most in (("Ġ", 3), ("", 3)):
        for length in range(1, most + 1):
            for letters in product(ascii_lowercase, repeat=length):
                left, right = start + "".join(letters[:-1]), letters[-1]
                if left and len(pieces) < num_tokens:
                    pieces.append(left + right)
                    merges.append((left, right))
    assert len(pieces) == len(set(pieces)) == num_tokens
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


if __name__ == "__main__":
    main()
