"""Flags of the model: which one, and how it is computed."""

from text_generation_process import defaults
from text_generation_process.option import (
    DOWNLOAD,
    ROUTER,
    SHARD,
    Child,
    Option,
    choice,
    number,
    refused,
    whole,
)

_NEVER_REMOTE_CODE = (
    "--trust-remote-code has no effect: pytgi never runs code from a model repository, and serves "
    "models whose architecture is built in"
)
# TGI's other values. Most of them need a checkpoint that is already quantized.
_CHECKPOINT_QUANTIZATIONS = (
    "awq",
    "bitsandbytes",
    "bitsandbytes-nf4",
    "bitsandbytes-fp4",
    "compressed-tensors",
    "eetq",
    "exl2",
    "gptq",
    "marlin",
)
_ONLY_AT_LOAD = (
    "--quantize takes int8 or int4, and on cuda fp8, which are made from any float checkpoint "
    f"while it loads; other methods ({', '.join(_CHECKPOINT_QUANTIZATIONS)}) are not supported: "
    "choose one of the three and an unquantized checkpoint"
)

MODEL = (
    Option("model-id", "hub id or local directory; by default the embedded model"),
    Option(
        "revision",
        "branch, commit or refs/pr/N on the hub",
        to=(Child.DOWNLOAD, Child.ROUTER),
    ),
    Option("dtype", "data type of the weights", choice("float32", "float16", "bfloat16"), SHARD),
    Option("device", "device that computes the model", choice("cpu", "cuda"), SHARD),
    Option("huggingface-hub-cache", "directory of the hub cache", to=DOWNLOAD),
    Option(
        "quantize",
        "quantize the weights to int8 or int4, or on cuda to fp8 (compute capability 8.9 or "
        "newer), while any float checkpoint loads",
        choice("int8", "int4", "fp8", *_CHECKPOINT_QUANTIZATIONS),
        SHARD,
        refusal=_ONLY_AT_LOAD,
        plain=("int8", "int4", "fp8"),
    ),
    Option(
        "deterministic",
        "start only if a request's tokens are the same in every batch, bit for bit",
        to=SHARD,
        switch=True,
    ),
    Option("speculate", "maximum tokens drafted per request and step; 0: none", whole(0), ROUTER),
    Option(
        "kv-cache-dtype",
        "store keys and values in 8 bits, without scales, instead of the type of --dtype (CUDA)",
        choice("fp8_e4m3fn", "fp8_e5m2"),
        SHARD,
    ),
    Option(
        "trust-remote-code",
        "no effect: pytgi runs no code from a model repository",
        switch=True,
        note=_NEVER_REMOTE_CODE,
    ),
    refused("weights-cache-override", "a separate weights folder", "give --model-id a directory"),
    refused("lora-adapters", "LoRA adapters", "merge the adapter into the weights first"),
    Option(
        "rope-scaling", "RoPE scaling, for a longer context", choice("linear", "dynamic"), SHARD
    ),
    Option(
        "rope-factor",
        f"factor of --rope-scaling, {defaults.ROPE_FACTOR} if only --rope-scaling is given",
        number(0),
        SHARD,
    ),
)
