"""The one place that names attention implementations."""

import torch

from text_generation_shard.device.attention import AttentionBackend
from text_generation_shard.device.cpu import kernels
from text_generation_shard.models.config import ModelConfig


def create_backend(
    name: str, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """`torch` is the reference, and runs on any device; `packed` is the fast one on the processor;
    `auto` is packed where it can be. ValueError for another name."""
    if name == "auto":
        fits = config.head_dim % 16 == 0 and config.head_dim <= kernels.MAX_HEAD_DIM
        name = "packed" if fits and kernels.are_used(dtype, device) else "torch"
    if name == "packed":
        from text_generation_shard.device.cpu.attention import PackedAttention

        return PackedAttention(config.num_heads, config.num_kv_heads)
    if name == "torch":
        from text_generation_shard.device.reference.attention import TorchAttention

        return TorchAttention()
    raise ValueError(f"no attention implementation is named {name}; there are: torch, packed")
