"""Writes the checkpoint the benchmarks serve: a random Llama of 125 M parameters in bfloat16.

The shape is that of SmolLM2-135M with a smaller vocabulary. The tokenizer is byte-level BPE whose
merges make every word " abc" of three lower-case letters one token, so a prompt of n such words
has exactly n tokens, and nearly every token a random model chooses is text by itself.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 32_768
HIDDEN = 576
INTERMEDIATE = 1_536
LAYERS = 30
HEADS = 9
KV_HEADS = 3
HEAD_DIM = HIDDEN // HEADS
END_OF_TEXT = "<|endoftext|>"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}


PHRASE_TOKENS = 24


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


def write_checkpoint(
    directory: Path, *, is_repeating: bool = False, num_layers: int = LAYERS
) -> None:
    """Writes config, weights and tokenizer; the same bytes every time."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = _weights(num_layers)
    if is_repeating:
        _make_repeating(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    config = {**CONFIG, "num_hidden_layers": num_layers, "tie_word_embeddings": not is_repeating}
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _weights(num_layers: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(125)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (0.04 * torch.randn(rows, columns, generator=generator)).bfloat16()

    weights = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        }
    weights["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    return weights


def _make_repeating(weights: dict[str, torch.Tensor]) -> None:
    """Every token is followed by its neighbour, the last of a phrase by its first.

    Layers cost what they did but add nothing, so the hidden state is the token's embedding, and
    the head's row of each token is the embedding of the one before it.
    """
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    tokens = torch.arange(VOCAB_SIZE)
    is_first = tokens % PHRASE_TOKENS == 0
    before = torch.where(is_first, tokens + PHRASE_TOKENS - 1, tokens - 1) % VOCAB_SIZE
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"][before].clone()


def _tokenizer() -> Tokenizer:
    """Merges in order of preference: " a", " ab", " abc", then "ab" and "abc" until it is full."""
    pieces = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for start, most in (("Ġ", 3), ("", 3)):
        for length in range(1, most + 1):
            for letters in product(ascii_lowercase, repeat=length):
                left, right = start + "".join(letters[:-1]), letters[-1]
                if left and len(pieces) < VOCAB_SIZE:
                    pieces.append(left + right)
                    merges.append((left, right))
    assert len(pieces) == len(set(pieces)) == VOCAB_SIZE
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


if __name__ == "__main__":
    main()
