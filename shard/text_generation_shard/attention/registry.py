"""The one place that names attention implementations."""

from text_generation_shard.attention.base import AttentionBackend


def create_backend(name: str) -> AttentionBackend:
    """`torch` is the reference, and runs on any device. ValueError for another name."""
    if name == "torch":
        from text_generation_shard.attention.torch_sdpa import TorchAttention

        return TorchAttention()
    raise ValueError(f"the attention implementation {name} does not exist; there is: torch")
