"""The interface between the engine, the model and the hardware.

A device is one object: a `reference.device.Device`, which is also the specification in plain torch.
It creates everything that depends on the hardware: weights in the form it multiplies, attention
with its KV cache, and the runner that computes steps. Code outside the device's folder uses only
this interface.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import NO_INTS, Ints, Tokens
from text_generation_shard.parallel import World
from text_generation_shard.sampling import (
    Allowed,
    Choice,
    SamplingTable,
    Scores,
    TokenHistory,
    Watermark,
)


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Options for opening a device."""

    # float32, float16 or bfloat16; None: the device chooses.
    dtype: str | None
    # The dtype of the checkpoint.
    checkpoint_dtype: str
    # int8, int4 or fp8; None: weights are kept in `dtype`.
    quantize: str | None = None
    # fp8_e4m3fn or fp8_e5m2; None: keys and values are kept in `dtype`.
    kv_cache_dtype: str | None = None
    # Whether tokens must not depend on the rest of the batch; see `Device.is_deterministic`.
    deterministic: bool = False
    # Fraction of the device's memory that this process may use, if the device has its own memory.
    memory_fraction: float = 1.0
    # Pass sizes to record, if the device can record passes; None: the device's default sizes.
    cuda_graphs: tuple[int, ...] | None = None
    # Rank of this process, and the number of ranks on this machine; each has one device.
    rank: int = 0
    world_size: int = 1


class Activation(StrEnum):
    """Activation function of a gated feed-forward."""

    SILU = "silu"
    GELU = "gelu"
    # GELU by the tanh approximation.
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


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


ALL = slice(None)
"""All columns of a weight."""


class Form(NamedTuple):
    """How a weight of a given shape is stored: int8, int4, fp8 or None (float); and why it is not
    the requested form (empty: it is)."""

    kind: str | None
    obstacle: str


class Matrix(Protocol):
    """A weight [N, K] in the form that its device multiplies. Owns the only copy."""

    # int4, int8, fp8 or the name of a dtype.
    kind: str
    nbytes: int

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden [T, K] → [T, N], plus bias [N]; of a gated matrix [2 * N, K], whose bias is
        [2 * N]: activation(first half) * second half."""


class EmbeddingTable(Protocol):
    """Token embeddings [vocab_size, hidden_size]."""

    kind: str
    nbytes: int

    def lookup(self, ids: Tensor) -> Tensor:
        """ids [T] → [T, hidden_size]."""

    def as_matrix(self) -> tuple[Matrix, int]:
        """The same weight as a matrix, and how many bytes that takes in addition to the table."""


class WeightCopies:
    """Fills tensors on a device from a checkpoint. Only the loading thread calls it. Here, copies
    and actions run at once, in that thread."""

    # The dtype in which a matrix is assembled; None: the checkpoint's dtype.
    matrix_dtype: torch.dtype | None = None

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start copying `source`, which is mapped from a file, to `target` on the device: same
        shape, converted to the dtype of `target`. Raises the error of this copy or of an earlier
        one."""
        target.copy_(source)

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` in this thread once device operations see the results of all copies before
        it: now, in a later call, or after the last copy."""
        action()


class Model(Protocol):
    """A loaded model."""

    attention: Attention

    @property
    def length_rule(self) -> str | None:
        """Name of the length that selects a token's rope frequencies; None: they are the same for
        all lengths."""

    @property
    def is_recordable(self) -> bool:
        """Whether a pass may be recorded, and replayed with other inputs of the same shape."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Last hidden states [T, hidden_size]; writes keys and values to the cache."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [S, vocab_size] in float32 for hidden states [S, hidden_size]."""

    def prepare_recording(self, longest: int) -> None:
        """Make all memory that a recorded pass with positions below `longest` reads, in its final
        place. Only if `is_recordable`."""


class Rows(Protocol):
    """State of all rows on the host. Only the row table writes it, between two launches."""

    # [capacity, width] token ids and block numbers.
    token_ids: Tokens
    block_tables: Ints
    # [capacity] tokens in the cache, of the input and of the prompt of each row.
    lens: Ints
    input_lens: Ints
    prompt_lens: Ints
    # [capacity] number of blocks of each row, and how many requests have used the row so far. While
    # a request uses a row, blocks are only appended to its table.
    num_blocks: Ints
    num_takes: Ints
    # Tokens per block, and number of cache blocks for requests.
    block_size: int
    num_cache_blocks: int


class ScheduledTokens(NamedTuple):
    """Scheduled tokens of one forward pass: `counts` tokens of each of R rows, from position
    `starts`. A token is sampled after each of a row's last `num_sampled` tokens. All arrays are
    [R].
    """

    rows: Ints
    starts: Ints
    counts: Ints
    num_sampled: Ints
    # End position of each row's tokens.
    ends: Ints
    # Every row has exactly one token, and one is sampled after it.
    is_decode: bool = False
    # [W] indices of the rows whose input token only the device knows: it was chosen in the previous
    # step, whose result was not read yet.
    waiting: Ints = NO_INTS
    # See ForwardBatch.states.
    states: tuple[RowState, ...] | None = None

    def tokens(self) -> tuple[Ints, Ints]:
        """[T] row and [T] position of each token; the first may be `rows` itself."""
        if self.is_decode:
            return self.rows, self.starts
        return np.repeat(self.rows, self.counts), last_ones(self.ends, self.counts)


def last_ones(ends: Ints, counts: Ints) -> Ints:
    """For each of `ends`, the last `counts` integers before it, concatenated."""
    shifts: Ints = np.repeat(ends - counts.cumsum(), counts)
    return shifts + np.arange(len(shifts))


class ChoiceInputs(NamedTuple):
    """What the choice of tokens depends on, beside their scores: the arguments of a `Sampler`."""

    table: SamplingTable
    history: TokenHistory
    end_ids: Ints
    watermark: Watermark
    allowed: Allowed | None


class Launched(Protocol):
    """A point behind the passes of a step, or behind the choice of its tokens."""

    def wait(self) -> None:
        """Block until `result` returns without waiting. Raises nothing; any thread may call it."""

    def result(self) -> "StepScores":
        """Wait for the device, and return the choice or raise the step's error."""


class StepScores(NamedTuple):
    """The result of a step. Also a `Launched` for devices that compute during the call."""

    # None: no token was chosen.
    choice: Choice | None
    # time.perf_counter_ns() at the end of all passes.
    forward_done_ns: int

    def wait(self) -> None:
        """See Launched."""

    def result(self) -> "StepScores":
        """See Launched."""
        return self


class Runner(Protocol):
    """Computes passes and choices in the order of the calls, now or later. Row state is read only
    during a call."""

    # Whether steps are recorded by size, then replayed.
    records_steps: bool
    # Whether the first step of a kind may compile code, so its time says nothing about later steps.
    compiles_steps: bool

    def hidden(self, rows: Rows, scheduled: ScheduledTokens) -> Tensor:
        """Last hidden states [T, hidden_size] of all tokens of a pass."""

    def scores(self, rows: Rows, scheduled: ScheduledTokens, is_kept: bool) -> Scores:
        """Scores [S, vocab_size] of the sampled positions of a pass, in float32. They are valid
        until the next pass, or, if `is_kept`, as long as they are referenced."""

    def choose(self, scores: Scores, given: ChoiceInputs) -> Launched:
        """Choose a token for each of the scores [S, vocab_size], which may be overwritten; S is not
        0. See `sampling.sample`."""

    def mark(self) -> Launched:
        """The end of the passes so far, without a choice."""


class MemoryBudget(NamedTuple):
    """Memory in bytes: for the KV cache, reserved for the largest step, and reserved for recorded
    steps."""

    cache: int
    step: int
    graphs: int = 0


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

    def angles(self, batch: ForwardBatch) -> Angles:
        """Rotation angles of the tokens of a pass."""

    def angle_table(self, end: int) -> Tensor:
        """`Angles.table` for the positions below `end`; only if `length_rule` is None."""

    def weights(self) -> DecoderWeights:
        """The weights of this rank."""
