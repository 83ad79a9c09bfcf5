"""One forward pass: its inputs, and the interface of attention."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class RowState(NamedTuple):
    """The recurrent state of one row of a pass: where it comes from, and where it is stored beside
    the row itself. A pass reads snapshots before it stores any, or computes its rows in order."""

    # Number of the row, whose state the model keeps from one pass to the next.
    row: int
    # The first pass of a request begins with the state at `snapshot`; None: with an empty state.
    is_first: bool
    snapshot: int | None = None
    # (position, snapshot): the state after the row's first `position` tokens, the last of which is
    # in this pass, is stored as this snapshot. Positions ascend.
    stores: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The input of one pass: T tokens of R rows, one row after another, without padding. Each row
    has its last tokens here. The tokens before them are in the cache, or an earlier row of the same
    pass writes them to it.
    """

    # [T] token ids and their positions.
    input_ids: Tensor
    positions: Tensor
    # [T] sequence length that selects the rope frequencies; None if they do not depend on a length.
    rope_lens: Tensor | None
    # [T] slot of each token's key and value: block * block_size + offset.
    slots: Tensor
    # [R, width] block numbers, and [R] tokens that each row sees, including those of this pass.
    block_tables: Tensor
    context_lens: Tensor
    # R + 1 offsets into the T tokens, and the values of context_lens, on the host.
    cu_seqlens_q: tuple[int, ...]
    host_context_lens: tuple[int, ...]
    # [S] indices of the tokens whose logits are needed; None: all tokens.
    logits_indices: Tensor | None
    # Every row has exactly one token.
    is_decode: bool
    # [R] for models that keep a state per row; None for other models.
    states: tuple[RowState, ...] | None = None


class Angles(NamedTuple):
    """Rotation angles of T tokens: rows `rows` [T] of `table` [*, 2, rotary_dim / 2], float32
    cosines and sines."""

    table: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What determines the size of one block of the KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    # Of the layers with other heads, which have the same block numbers.
    others: tuple["CacheShape", ...] = ()

    @property
    def dtype_name(self) -> str:
        """For example float8_e5m2, without the "torch." prefix."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of all layers."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.block_size + sum(other.block_bytes for other in self.others)


class Scoring(NamedTuple):
    """How a layer changes its scaled scores before the softmax."""

    # Scores are softcap * tanh(score / softcap); None: as they are.
    softcap: float | None
    # [num_heads] a score of each head beside those of its keys, without a value; None: none.
    sinks: Tensor | None


class AttentionPlan(Protocol):
    """The result of `Attention.plan` for one pass; opaque to callers."""


class Attention(Protocol):
    """Attention of all heads over the paged KV cache. Owns the cache; keeps no state of a batch."""

    name: str
    # Tokens per block; the router allocates whole blocks.
    block_size: int
    # A query's result is bit for bit the same, regardless of how its row is split into passes and
    # of the other rows in them.
    is_deterministic: bool
    # Number of prompt keys at which a pass takes most memory; None: memory grows with their number.
    heaviest_keys: int | None

    def workspace_bytes(self, shape: CacheShape) -> int:
        """Most bytes that a pass takes in addition to its activations, for devices that estimate
        memory: see `Device.free_bytes`."""

    def allocate(self, shape: CacheShape, num_blocks: int) -> int:
        """Allocate the cache and return its size in bytes. A second call first frees the previous
        cache."""

    def plan(self, batch: ForwardBatch, angles: Angles) -> AttentionPlan:
        """Compute what all layers of one pass share."""

    def forward(
        self, heads: Tensor, layer: int, window: int | None, is_rotated: bool, plan: AttentionPlan
    ) -> Tensor:
        """Rotate queries and keys, if `is_rotated`: feature i with feature i + rotary_dim / 2.
        Scale queries, store keys and values, attend.

        `heads` is [T, num_heads + 2 * num_kv_heads, head_dim], contiguous: queries, keys, values.
        It may be overwritten. A token sees itself and the tokens before it in its row; with a
        `window`, only the last `window` of these. Returns [T, num_heads * head_dim].
        """
