"""A shard's memory: what the largest step takes, and how many blocks fit beside it."""

from dataclasses import dataclass

import torch

from text_generation_shard.checkpoint.config import ModelConfig
from text_generation_shard.device.forward import CacheShape
from text_generation_shard.engine.plan import LOGPROB_ROWS
from text_generation_shard.engine.step import WarmupLimits
from text_generation_shard.errors import ModelError

# Bytes per choice and vocabulary entry when sampling with all parameters: float32 and float64
# copies of the scores, and their order.
_SAMPLING_BYTES = 50


@dataclass(frozen=True, slots=True)
class Ledger:
    """The uses of a shard's memory in bytes, with notes for the log."""

    weights: int
    cache: int
    blocks: str
    # The largest possible step.
    activations: int
    largest_step: str
    # Recorded graphs.
    graphs: int
    graphs_note: str
    # Unused memory of the device, or of this process's share of it.
    left: int

    def lines(self) -> list[str]:
        """The table, line by line."""
        rows = [
            ("weights", self.weights, ""),
            ("KV cache", self.cache, self.blocks),
            ("activations", self.activations, self.largest_step),
            ("graphs", self.graphs, self.graphs_note),
            ("left", self.left, ""),
        ]
        return [
            f"memory: {name:<12}{size / 1e9:8.3f} GB  {note}".rstrip() for name, size, note in rows
        ]


def longest_context(limits: WarmupLimits, max_position: int) -> int:
    """Tokens of the longest possible request, before the size of the cache is known."""
    longest = limits.max_total_tokens or max_position
    return max(2, min(longest, limits.max_batch_total_tokens or longest))


def activation_bytes(config: ModelConfig, dtype: torch.dtype, limits: WarmupLimits) -> int:
    """Estimated bytes of the largest step in `dtype`, for a device that does not rehearse it: the
    full prefill budget beside all decoding rows, then sampling for all with all parameters."""
    tokens = limits.max_prefill_tokens + limits.max_batch_size
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    # The residual, its norm and the addend; beside them attention or feed-forward.
    widest = 3 * config.hidden_size + max(heads, 3 * config.intermediate_size)
    passing = tokens * widest * dtype.itemsize
    # Prompt log-probabilities hold the scores of some tokens twice during the pass.
    prompts = 2 * LOGPROB_ROWS * config.vocab_size * 4
    return max(passing + prompts, _SAMPLING_BYTES * limits.max_batch_size * config.vocab_size)


def cache_size(
    shape: CacheShape, limits: WarmupLimits, available: int, max_position: int
) -> tuple[int, int]:
    """Number of blocks and longest request; ModelError with the numbers if they do not fit."""
    fitting = available // shape.block_bytes
    wanted = limits.max_batch_total_tokens
    if wanted is not None:
        num_blocks = wanted // shape.block_size
        if num_blocks > fitting:
            raise ModelError(
                f"--max-batch-total-tokens {wanted} needs "
                f"{num_blocks * shape.block_bytes / 1e9:.1f} GB of KV cache, but there is room for "
                f"{fitting * shape.block_size} tokens; decrease it"
            )
    else:
        # No more than all rows at their longest can use.
        longest = limits.max_total_tokens or max_position
        rows = limits.max_batch_size * -(-longest // shape.block_size)
        num_blocks = min(fitting, rows)
    tokens = num_blocks * shape.block_size
    if limits.max_total_tokens == 1:
        raise ModelError("--max-total-tokens must be at least 2: a prompt token and a new one")
    max_total = limits.max_total_tokens or min(max_position, tokens)
    if max_total > tokens or tokens < 2:
        raise ModelError(
            f"Not enough memory to handle `max_total_tokens={max(max_total, 2)}`: the KV cache has "
            f"room for {tokens} tokens; decrease it or give the server more memory"
        )
    return num_blocks, max_total
