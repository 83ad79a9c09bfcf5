"""Tiny checkpoints of the architectures that transformers computes: table, writer and oracle.

The writer is `integration_tests.checkpoints` with other settings: every feature of an architecture
is switched on, norms are not ones, biases not zeros, windows are shorter than the prompts, and a
hybrid has layers of both kinds, so that a forgotten term changes the tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from integration_tests.checkpoints import MAX_POSITIONS, VOCAB_SIZE, write_tokenizer

Settings = Mapping[str, Any]

WINDOW = 8
PROMPT_LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 33, 60)
# Scores this near may change places when sums are added in another order.
TIE = 2e-4

# What `attribute_map` of each configuration gives its own name.
_SHAPE: Settings = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
HEAD: Settings = {"head_dim": 32}
WINDOWS: Settings = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
# Tied, embeddings of this size answer every token with itself.
_UNTIED: Settings = {"tie_word_embeddings": False}
_GEMMA: Settings = {**HEAD, **WINDOWS, **_UNTIED, "query_pre_attn_scalar": 24}
_CAPS: Settings = {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0}
MULTIPLIERS: Settings = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.13,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.7,
}
EXPERTS: Settings = {"num_local_experts": 4, "num_experts_per_tok": 2}
NAMED_EXPERTS: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED_EXPERTS: Settings = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.3,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Multi-head latent attention: queries and keys of 24 features, values of 16.
LATENT: Settings = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_MAMBA: Settings = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "mamba_proj_bias": True,
}
DELTA_NET: Settings = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
CONVOLUTION: Settings = {
    "conv_bias": True,
    "layer_types": ["conv", "full_attention", "conv"],
}

SERVED: Mapping[str, Settings] = {
    "apertus": {},
    "arcee": {**HEAD, "attention_bias": True, "mlp_bias": True},
    "bamba": {**_MAMBA, "attn_layer_indices": [1], "attention_bias": True, "mlp_bias": True},
    "codegen": {"rotary_dim": 8},
    "cohere": {"logit_scale": 0.8, "use_qk_norm": True, "attention_bias": True},
    "cohere2": {**HEAD, **WINDOWS, "logit_scale": 0.8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_top_k": 2},
        "d_model": 64,
        "without": ("hidden_size", "num_key_value_heads", "intermediate_size"),
    },
    "deepseek_v2": {
        **LATENT,
        **ROUTED_EXPERTS,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {**LATENT, **ROUTED_EXPERTS},
    "ernie4_5": {**HEAD, "use_bias": True},
    "ernie4_5_moe": {
        "use_bias": True,
        "moe_intermediate_size": 32,
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
    },
    "exaone4": {**HEAD, **WINDOWS},
    "exaone_moe": {
        **HEAD,
        **WINDOWS,
        **NAMED_EXPERTS,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "n_group": 2,
    },
    "falcon_h1": {
        **_MAMBA,
        "num_hidden_layers": 2,
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "lm_head_multiplier": 0.7,
        "embedding_multiplier": 3.0,
        "mlp_multipliers": [0.8, 1.1],
        "key_multiplier": 0.9,
        "attention_out_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 0.6,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "gemma": {**HEAD, "attention_bias": True},
    "gemma2": {**_GEMMA, **_CAPS},
    "gemma3_text": _GEMMA,
    # The last two layers attend to keys and values of the first two.
    "gemma3n_text": {
        **HEAD,
        **_UNTIED,
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    # Heads of two sizes.
    "gemma4_text": {
        **HEAD,
        **_UNTIED,
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {"1": {"head_dim": 64}, "3": {"head_dim": 64}},
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
    },
    # As Gemma 4 26B: values are keys where all is attended to, experts beside a dense block.
    "gemma4_text-experts": {
        **HEAD,
        **_UNTIED,
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {
            "1": {"head_dim": 64, "num_key_value_heads": 1},
            "3": {"head_dim": 64, "num_key_value_heads": 1},
        },
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "glm": HEAD,
    "glm4": HEAD,
    "glm4_moe": {**HEAD, **ROUTED_EXPERTS, "attention_bias": True, "use_qk_norm": True},
    "gpt2": {**_UNTIED, "scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neox": {},
    "gpt_oss": {**HEAD, **WINDOWS, **EXPERTS},
    "gptj": {"rotary_dim": 8},
    "granitemoe": {**MULTIPLIERS, **EXPERTS, "attention_bias": True},
    "granitemoehybrid": {
        **MULTIPLIERS,
        **EXPERTS,
        **_MAMBA,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "position_embedding_type": "rope",
        "shared_intermediate_size": 32,
    },
    "granitemoeshared": {**MULTIPLIERS, **EXPERTS, "shared_intermediate_size": 32},
    "helium": {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "hunyuan_v1_dense": {**HEAD, "attention_bias": True},
    "hyperclovax": {**HEAD, **MULTIPLIERS, "attention_bias": True, "mlp_bias": True},
    "lfm2": {**CONVOLUTION, "block_multiple_of": 32},
    "lfm2_moe": {**CONVOLUTION, **NAMED_EXPERTS, "num_dense_layers": 1},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "use_bias": True,
    },
    "minicpm3": {**LATENT, **_UNTIED, "dim_model_base": 32},
    "minimax_m2": {**HEAD, **EXPERTS},
    "ministral": {**HEAD, **WINDOWS},
    # Queries are scaled by their position, in steps of 16.
    "ministral3": {
        **HEAD,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "mixtral": {**HEAD, **EXPERTS, "sliding_window": WINDOW},
    "nanochat": {"attention_bias": True},
    "nemotron": {**HEAD, "attention_bias": True, "mlp_bias": True},
    # Steps of time have a least size in prompts only: with 0.001 transformers' scores of a token
    # depend on whether it was in the prompt.
    "nemotron_h": {
        "time_step_min": 1e-6,
        **ROUTED_EXPERTS,
        "head_dim": 32,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 32,
        "without": ("num_hidden_layers",),
    },
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {"attention_bias": True},
    "olmo3": WINDOWS,
    "olmoe": {**EXPERTS, "num_experts": 4, "clip_qkv": 2.0},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    # As OPT 350M: embeddings are projected, and norms come last.
    "opt-350m": {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "persimmon": {},
    "phi": {"qk_layernorm": True},
    "phimoe": {**EXPERTS, "attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {**NAMED_EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**DELTA_NET, **NAMED_EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**HEAD, **NAMED_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "qwen3_next": {**DELTA_NET, **NAMED_EXPERTS, "shared_expert_intermediate_size": 48},
    "seed_oss": HEAD,
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": {**_GEMMA, **_CAPS, "tie_word_embeddings": True},
}
"""What must give the tokens of transformers, by model_type and, after a dash, its variant."""

REFUSED: Mapping[str, Settings] = {
    "falcon": {"alibi": True, "num_kv_heads": 2, "new_decoder_architecture": True},
    "bloom": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_hidden_layers": 2},
    "jamba": {
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "llama4_text": {
        "head_dim": 16,
        "num_local_experts": 4,
        "intermediate_size_mlp": 64,
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    },
    "recurrent_gemma": {"lru_width": 64, "head_dim": 16, "attention_window_size": WINDOW},
    "t5": {"d_ff": 96, "d_kv": 16},
    "bart": {"encoder_layers": 2, "decoder_layers": 2},
    "mpt": {},
}
"""What can not be served, by model_type."""


def write_architecture(name: str, directory: Path, **overrides: Any) -> Path:
    """Write a checkpoint of SERVED or REFUSED, or of another model_type, into the directory, which
    it returns. Two calls write the same bytes. Overrides are fields of config.json."""
    settings = {**_SHAPE, **({**SERVED, **REFUSED}.get(name, {})), **overrides}
    for key in settings.pop("without", ()):
        del settings[key]
    config = transformers.AutoConfig.for_model(name.partition("-")[0], **settings)
    auto = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        auto = transformers.AutoModelForSeq2SeqLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32)
    _fill(model)
    model.generation_config.eos_token_id = 0
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def _fill(model: torch.nn.Module) -> None:
    """Matrices are random; what is a vector keeps what transformers began with, plus noise."""
    generator = torch.Generator().manual_seed(20_26)
    seen = set()
    for tensor in model.state_dict().values():
        if tensor.data_ptr() in seen or not tensor.is_floating_point():
            continue
        seen.add(tensor.data_ptr())
        noise = 0.2 * torch.randn(tensor.shape, generator=generator)
        tensor.copy_(noise if tensor.dim() > 1 else tensor + noise)


def ragged_prompts() -> list[list[int]]:
    """Random ids, PROMPT_LENGTHS of them."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


@dataclass(frozen=True, slots=True)
class Answer:
    """What transformers makes of one prompt, alone and without padding, in float32."""

    tokens: list[int]
    logprobs: list[float]
    """Of each token."""
    prompt_logprobs: list[float]
    """Of each id but the first."""
    num_certain: int
    """How many of the tokens come before one whose score another one nearly reaches."""


@torch.inference_mode()
def answers_of(directory: Path, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Answer]:
    """The answers by `generate`, greedily."""
    torch.set_num_threads(1)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(directory, dtype=torch.float32).eval()
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens}
    asked = {**settings, "output_logits": True, "return_dict_in_generate": True}
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        logits = torch.cat(found.logits)
        best = logits.topk(2).values
        ties = (best[:, 0] - best[:, 1] < TIE).nonzero()
        tokens = found.sequences[0, len(prompt) :]
        before = model(ids, use_cache=False).logits[0, :-1]
        answers.append(
            Answer(
                tokens.tolist(),
                _logprobs(logits, tokens),
                _logprobs(before, ids[0, 1:]),
                int(ties[0]) if len(ties) else len(tokens),
            )
        )
    return answers


def _logprobs(logits: Tensor, chosen: Tensor) -> list[float]:
    found: list[float] = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].tolist()
    return found
