"""Turns the GGUF file of a package into a Hugging Face checkpoint in bfloat16.

Runs in the package's own environment, `.venv-weights/NAME`, which make sets up, and writes the
folder `checkpoint` in it. Nothing of that may be committed: Gemma's licence forbids it.
"""

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from transformers import AutoTokenizer

WHOLE = "model.gguf"
OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}


def main() -> None:
    """Converts into the directory given on the command line."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    source = _model_file(directory.parent)
    reader = GGUFReader(source)
    facts = {key: field.contents() for key, field in reader.fields.items()}
    weights = dict(_weights(reader, facts))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = _config(facts, is_tied="lm_head.weight" not in weights)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps(ends, indent=2))
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.save_pretrained(directory)
    (directory.parent / WHOLE).unlink(missing_ok=True)


def _model_file(folder: Path) -> Path:
    """The one GGUF file of the environment. Gemma's comes in parts, which are put together."""
    parts = sorted(Path(sysconfig.get_path("purelib")).glob("*/**/*.gguf*"))
    if len(parts) == 1:
        return parts[0]
    whole = folder / WHOLE
    with whole.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    return whole


def _weights(reader: GGUFReader, facts: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors by their names in transformers."""
    architecture = facts["general.architecture"]
    in_layers = IN_LAYERS | NORMS[architecture]
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        kind, *inner = tensor.name.removesuffix(".weight").split(".")
        if kind == "blk":
            layer, kind = inner
            name = f"model.layers.{layer}.{in_layers[kind]}"
        else:
            name = OUTSIDE[kind]
        if architecture == "llama" and kind in ("attn_q", "attn_k"):
            # A head's numbers alternate between the halves that transformers rotates.
            count = "head_count" if kind == "attn_q" else "head_count_kv"
            heads = values.unflatten(0, (facts[f"llama.attention.{count}"], -1, 2))
            values = heads.transpose(1, 2).flatten(0, 2)
        if architecture == "gemma3" and kind.endswith("norm"):
            values -= 1  # transformers adds it
        yield f"{name}.weight", values.bfloat16().contiguous()


def _config(facts: dict[str, Any], is_tied: bool) -> dict[str, Any]:
    """The config.json."""
    architecture = facts["general.architecture"]
    own = {key.removeprefix(f"{architecture}."): value for key, value in facts.items()}
    config = {
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": own["attention.head_count"],
        "num_key_value_heads": own["attention.head_count_kv"],
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": own["attention.layer_norm_rms_epsilon"],
        "rope_theta": own["rope.freq_base"],
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": is_tied,
        "torch_dtype": "bfloat16",
    }
    if architecture == "llama":
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            **config,
        }
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": own["attention.key_length"],
        "query_pre_attn_scalar": own["attention.key_length"],
        "sliding_window": own["attention.sliding_window"],
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        **config,
    }


if __name__ == "__main__":
    main()
