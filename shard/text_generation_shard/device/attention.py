"""What an attention implementation must offer."""

from typing import Protocol

import torch
from torch import Tensor

from text_generation_shard.device.batch import ForwardBatch
from text_generation_shard.device.cpu.first_touch import Parts
from text_generation_shard.device.reference.kv_cache import CacheShape

# Cached tokens an implementation may copy at once, for keys and again for values.
MAX_GATHER_TOKENS = 1 << 17


class AttentionPlan(Protocol):
    """What `AttentionBackend.plan` found out about one pass; opaque to everyone else."""


class Cache(Protocol):
    """Where keys and values are kept, in whatever order."""

    nbytes: int
    # Its memory, where that is the processor's and not there before it is written.
    parts: Parts | None


class AttentionBackend(Protocol):
    """Attention of all heads over the paged cache. Owns the cache, keeps nothing of a batch."""

    name: str
    # Tokens in a block; the router allocates in these units.
    block_size: int
    # A query's result is the same, bit for bit, however the tokens of its row are cut into passes
    # and whatever else is in them.
    is_deterministic: bool
    # Whether cached keys and values are copied before they are multiplied.
    gathers: bool

    def allocate(self, shape: CacheShape, num_blocks: int, device: torch.device) -> Cache:
        """Make the cache; called again, the former one is dropped first."""

    def plan(self, batch: ForwardBatch) -> AttentionPlan:
        """Everything that is the same in all layers of one pass."""

    def forward(
        self,
        query: Tensor,
        key_value: Tensor,
        layer: int,
        window: int | None,
        plan: AttentionPlan,
    ) -> Tensor:
        """Store keys and values, then attend with query [T, heads, head_dim].

        `key_value` is [T, 2 * kv_heads, head_dim], keys first. `query` is already scaled; a token
        sees itself and what came before it in its row, with a `window` only the last `window` of
        those. Answers [T, heads * head_dim].
        """
