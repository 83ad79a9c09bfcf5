"""A model with Llama's architecture as its weights, for devices that compute it as one program."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from text_generation_shard.device.base import EmbeddingTable, Matrix, Model
from text_generation_shard.device.forward import Angles, ForwardBatch
from text_generation_shard.parallel import World


class LayerWeights(NamedTuple):
    """One layer of `DecoderWeights`. Norms are [size] in float32; a missing bias is None."""

    attention_norm: Tensor
    # Queries, keys and values, stacked.
    qkv: Matrix
    qkv_bias: Tensor | None
    # Norms of each query and key head; None: heads are not normalized.
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Matrix
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    down_bias: Tensor | None
    # Whether queries and keys are rotated, and how many tokens a query sees (None: all).
    uses_rope: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Dimensions of a model with Llama's architecture."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    attention_scale: float
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float


class RankSizes(NamedTuple):
    """One rank's share of a model's `DecoderSizes`."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    # This rank's part of the vocabulary, padded to equal parts: first token and number of tokens.
    first_token: int
    num_tokens: int


class DecoderWeights(NamedTuple):
    """All weights of a model with Llama's architecture, for devices that compute it as one program.
    With several ranks, each holds its part."""

    sizes: DecoderSizes
    own: RankSizes
    world: World
    embedding: EmbeddingTable
    layers: Sequence[LayerWeights]
    norm: Tensor
    head: Matrix


@runtime_checkable
class Decoder(Model, Protocol):
    """A model with Llama's architecture."""

    @property
    def length_rule(self) -> str | None:
        """Name of the length that selects a token's rope frequencies; None: one table serves all
        lengths."""

    def angles(self, batch: ForwardBatch) -> Angles:
        """Rotation angles of the tokens of a pass."""

    def angle_table(self, end: int) -> Tensor:
        """`Angles.table` for the positions below `end`; only if `length_rule` is None."""

    def weights(self) -> DecoderWeights:
        """The weights of this rank."""
