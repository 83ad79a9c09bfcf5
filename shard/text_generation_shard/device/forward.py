"""One forward pass: what it computes, and what attention is asked for in it."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of R rows, one row after another, without padding. Frozen; lives for one pass.

    A row's tokens are its last ones: what it has before them is in the cache, or is written to it
    by an earlier row of the same pass.
    """

    # [T] token ids and their positions.
    input_ids: Tensor
    positions: Tensor
    # [T] length that decides the rope frequencies; None where the kind of rope asks for none.
    rope_lens: Tensor | None
    # [T] where each token's key and value go: block * block_size + offset.
    slots: Tensor
    # [R, width] block numbers, and [R] tokens each row sees, those of this pass counted in.
    block_tables: Tensor
    context_lens: Tensor
    # R + 1 offsets into the T tokens, and the values of context_lens, on the host.
    cu_seqlens_q: tuple[int, ...]
    host_context_lens: tuple[int, ...]
    # [S] tokens whose logits are wanted; None: all of them.
    logits_indices: Tensor | None
    # Every row has exactly one token.
    is_decode: bool


class Angles(NamedTuple):
    """What T tokens are rotated by: `rows` [T] of `table` [*, 2, rotary_dim / 2] in float32,
    cosines and sines."""

    table: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What decides the size of one block of the KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """float8_e5m2, without the name of the library."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def block_bytes(self) -> int:
        """Bytes one block takes over all layers, keys and values."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.block_size


class AttentionPlan(Protocol):
    """What `Attention.plan` found out about one pass; opaque to everyone else."""


class Attention(Protocol):
    """Attention of all heads over the paged cache. Owns the cache, keeps nothing of a batch."""

    name: str
    # Tokens in a block; the router allocates in these units.
    block_size: int
    # A query's result is the same, bit for bit, however the tokens of its row are cut into passes
    # and whatever else is in them.
    is_deterministic: bool
    # How many keys of prompts make the pass that takes most memory; None: the more, the more.
    heaviest_keys: int | None

    def workspace_bytes(self, shape: CacheShape) -> int:
        """Bytes that a pass takes at most beside its activations, where a device needs to be told:
        see `Device.free_bytes`."""

    def allocate(self, shape: CacheShape, num_blocks: int) -> int:
        """Make the cache and return its bytes; called again, the former one is dropped first."""

    def plan(self, batch: ForwardBatch, angles: Angles) -> AttentionPlan:
        """Everything that is the same in all layers of one pass."""

    def forward(
        self, heads: Tensor, layer: int, window: int | None, is_rotated: bool, plan: AttentionPlan
    ) -> Tensor:
        """Rotate queries and keys, if `is_rotated`: feature i with feature i + rotary_dim / 2.
        Scale queries, store keys and values, attend.

        `heads` is [T, num_heads + 2 * num_kv_heads, head_dim], contiguous: queries, keys, values.
        It may be overwritten. A token sees itself and what came before it in its row, with a
        `window` only the last `window` of those. Answers [T, num_heads * head_dim].
        """
