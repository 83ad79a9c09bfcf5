"""Where a shard's memory goes: what the largest step takes, and how many blocks fit beside it."""

from dataclasses import dataclass

import torch

from text_generation_shard.checkpoint.config import ModelConfig
from text_generation_shard.device.forward import CacheShape
from text_generation_shard.engine.plan import LOGPROB_ROWS
from text_generation_shard.engine.step import WarmupLimits
from text_generation_shard.errors import ModelError

# What sampling with every parameter takes per choice and vocabulary entry: some float32 and float64
# copies of the scores, and their order.
_SAMPLING_BYTES = 50


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where a shard's memory goes, in bytes, and in words what stands behind the numbers."""

    weights: int
    cache: int
    blocks: str
    # The largest step there can be.
    activations: int
    largest_step: str
    # Steps that the device has recorded.
    graphs: int
    graphs_note: str
    # What the machine, or this process's share of it, has beside all that.
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
    """Tokens of the longest request there may be, before the size of the cache is known."""
    longest = limits.max_total_tokens or max_position
    return max(2, min(longest, limits.max_batch_total_tokens or longest))


def activation_bytes(config: ModelConfig, dtype: torch.dtype, limits: WarmupLimits) -> int:
    """An estimate of what the largest step takes, computed in `dtype`, for a device that does not
    rehearse it: as much of inputs as a pass may hold beside all rows that decode, then the scores
    of all, with every way to choose from them."""
    tokens = limits.max_prefill_tokens + limits.max_batch_size
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    # The residual, its norm and what is added to it; beside them attention or feed-forward.
    widest = 3 * config.hidden_size + max(heads, 3 * config.intermediate_size)
    passing = tokens * widest * dtype.itemsize
    # Prompt log-probabilities need the scores of some tokens twice while the pass is there.
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
        # More than every row at its longest is never used.
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
