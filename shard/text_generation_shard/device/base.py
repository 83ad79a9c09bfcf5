"""What an engine and its model ask of hardware.

A device is one object that implements `Device`. It makes what depends on hardware: weights in the
form it multiplies, attention with its cache, and the runner that computes steps. Nothing outside
the folder of a device knows how. `device.reference` is the specification: plain torch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Ints, Tokens, Upload
from text_generation_shard.device.forward import Angles, Attention, ForwardBatch
from text_generation_shard.meeting import Meeting
from text_generation_shard.parallel import Collectives, World
from text_generation_shard.sampling.sampler import Choice, Chosen, Sampler, Scores


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What a device is opened with."""

    # float32, float16 or bfloat16; None: what suits the device.
    dtype: str | None
    # Of the checkpoint.
    checkpoint_dtype: str
    # int8, int4 or fp8; None: weights are kept in `dtype`.
    quantize: str | None = None
    # fp8_e4m3fn or fp8_e5m2; None: keys and values are kept in `dtype`.
    kv_cache_dtype: str | None = None
    # Whether tokens must not depend on what is computed beside them; see `Device.is_deterministic`.
    deterministic: bool = False
    # The share of the device's memory this process may fill, where that is not the machine's.
    memory_fraction: float = 1.0
    # Sizes of passes that are recorded where the device can; None: those that suit it.
    cuda_graphs: tuple[int, ...] | None = None
    # Of how many processes on this machine, each with a device, this is which.
    rank: int = 0
    world_size: int = 1


class Activation(StrEnum):
    """What gates go through before they multiply."""

    SILU = "silu"
    GELU = "gelu"
    # With a tanh in place of the error function.
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


ALL = slice(None)
"""Columns of a whole weight."""


class Form(NamedTuple):
    """How weights of a shape are held: int8, int4, fp8 or, None, as floats; and why not as asked
    (empty: they are)."""

    kind: str | None
    obstacle: str


class Matrix(Protocol):
    """A weight [N, K] in the form that its device multiplies. Owns its only copy."""

    # int4, int8, fp8 or the name of a dtype; and why it is not of fewer bits as asked (empty: it
    # is).
    kind: str
    obstacle: str
    nbytes: int

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden [T, K] → [T, N], plus bias [N]; of a gated matrix [2 * N, K], whose bias is
        [2 * N]: activation(first half) * second half."""


class EmbeddingTable(Protocol):
    """Vectors [vocab_size, hidden_size]."""

    kind: str
    obstacle: str
    nbytes: int

    def lookup(self, ids: Tensor) -> Tensor:
        """ids [T] → [T, hidden_size]."""

    def as_matrix(self) -> tuple[Matrix, int]:
        """The same weight for products, and the bytes that takes beside the table."""


class WeightCopies(Protocol):
    """Fills tensors on a device from a checkpoint. Only the thread that loads calls it."""

    # The type in which a matrix is put together; None: the checkpoint's own.
    @property
    def matrix_dtype(self) -> torch.dtype | None: ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy `source`, which lies in a file, to `target` on the device, of the same
        shape, in the type of `target`. Raises what went wrong, in this copy or an earlier one."""

    def then(self, action: Callable[[], None]) -> None:
        """Have `action` called, by this thread, when what it asks of the device finds the results
        of all copies before it: at once, in a later call, or when no more copies will come."""


class LayerWeights(NamedTuple):
    """One layer of `DecoderWeights`. Norms are [size] in float32; a bias may be missing."""

    attention_norm: Tensor
    # Queries, keys and values, stacked.
    qkv: Matrix
    qkv_bias: Tensor | None
    # Of each head; None: heads are not normalised.
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Matrix
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    down_bias: Tensor | None
    # Whether positions are rotated in, and how far back a token sees (None: all).
    uses_rope: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """What a model of Llama's shape has of what."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Leading features of each head that are rotated.
    rotary_dim: int
    vocab_size: int
    norm_eps: float
    attention_scale: float
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float


class RankSizes(NamedTuple):
    """What a rank has of the `DecoderSizes` of a model."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    # Of the vocabulary, filled up to as many for each rank: the first token, and how many.
    first_token: int
    num_tokens: int


class DecoderWeights(NamedTuple):
    """A whole model of Llama's shape, for devices that compute it as one; of several ranks each
    has its part."""

    sizes: DecoderSizes
    own: RankSizes
    world: World
    embedding: EmbeddingTable
    layers: Sequence[LayerWeights]
    norm: Tensor
    head: Matrix


class Model(Protocol):
    """A loaded model."""

    attention: Attention

    @property
    def length_rule(self) -> str | None:
        """The length a token's rope goes by; None: none, then angles come from one table."""

    @property
    def recompute_at(self) -> int | None:
        """Length beyond which a row is computed anew; None: no row ever is."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The last hidden states [T, hidden_size]; keys and values go into the cache."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [S, vocab_size] in float32 for hidden states [S, hidden_size]."""

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states [T, hidden_size] behind the last norm, of which scores are made."""

    def angles(self, batch: ForwardBatch) -> Angles:
        """What the tokens of a pass are rotated by."""

    def angle_table(self, end: int) -> Tensor:
        """`Angles.table` for the positions below `end`, where no length matters."""

    def weights(self) -> DecoderWeights | None:
        """All of it that this rank has; None: it is of another shape."""


class Rows(Protocol):
    """What the host knows of all rows. Only the row table writes it, between two launches."""

    # [capacity, width] token ids and block numbers.
    token_ids: Tokens
    block_tables: Ints
    # [capacity] how many blocks a row has, and how many requests have had it: block numbers are
    # added while one has it, and none is changed.
    num_blocks: Ints
    num_takes: Ints
    # Tokens of a block, and blocks of the cache that requests may have.
    block_size: int
    num_cache_blocks: int


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """What one forward pass computes of R rows: `counts` tokens of each, from `starts` on.

    A token is sampled after each of a row's last `num_sampled` tokens. All are [R].
    """

    rows: Ints
    starts: Ints
    counts: Ints
    num_sampled: Ints
    # Where the tokens of each row end.
    ends: Ints
    # Every row has one token, and one is sampled after it.
    is_decode: bool = False

    def tokens(self) -> tuple[Ints, Ints]:
        """[T] the row and the position of each token; rows may be `rows`."""
        if self.is_decode:
            return self.rows, self.starts
        return np.repeat(self.rows, self.counts), last_ones(self.ends, self.counts)


def last_ones(ends: Ints, counts: Ints) -> Ints:
    """The last `counts` numbers before each of `ends`, one after another."""
    shifts: Ints = np.repeat(ends - counts.cumsum(), counts)
    return shifts + np.arange(len(shifts))


class StepPlan(Protocol):
    """A step that was decided: its passes, and how tokens are chosen from their scores.

    Row state is read while `launch` runs, and not afterwards.
    """

    # What the passes are computed from, one after another.
    rows: Rows
    passes: Sequence[ScheduledTokens]
    # [S] the row of each score that `choose` is given.
    sampled_rows: Ints
    # Whether `choose` may be called already: the tokens of the step before are known, or no choice
    # depends on them. If not, it may once that step was collected.
    knows_tokens: bool
    # Whether hidden states are needed of tokens after which none is sampled. If not, a device may
    # compute scores by itself.
    wants_hidden: bool
    # Whether the scores of its choice are read when it is known.
    wants_scores: bool

    def batch(
        self, scheduled: ScheduledTokens, tables: Callable[[Ints, int], Tensor] | None = None
    ) -> ForwardBatch:
        """The inputs of a pass, on the device. BatchError if the shard is stopping.

        `tables` answers the block tables of some rows [R] for a number of tokens, where the device
        keeps them: [R, width]. Where a step is launched before the previous one has a result, the
        host does not know input_ids at `waiting`: the runner puts the ids there that it chose
        itself.
        """

    def waiting(self, scheduled: ScheduledTokens) -> Ints:
        """[W] which rows of a pass have an input token that the host does not know yet."""

    def scores(self, scheduled: ScheduledTokens, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """Of the tokens of a pass after which one is sampled [S, vocab_size], and on the way
        prompt log-probabilities; hidden [T, hidden_size]: of all its tokens."""

    def choose(self, scores: Scores) -> Choice | None:
        """A token for each of the S scores [S, vocab_size], which may be overwritten; None if there
        are none. By the definition, in plain torch."""

    def choose_by(self, sampler: Sampler[Chosen], scores: Scores) -> Chosen | None:
        """The same by another sampler."""


class Launched(Protocol):
    """A step that is under way."""

    def wait(self) -> None:
        """Until `result` does not, or hardly, wait; that raises what goes wrong. From any
        thread."""

    def result(self) -> "StepScores":
        """Wait for it; raises what went wrong. Asked once."""


class StepScores(NamedTuple):
    """What became of a step; as `Launched`, one that was computed when it was launched."""

    # None: no input was complete.
    choice: Choice | None
    # time.perf_counter_ns() when all passes were computed.
    forward_done_ns: int

    def wait(self) -> None:
        """See Launched."""

    def result(self) -> "StepScores":
        """See Launched."""
        return self


class Runner(Protocol):
    """Computes steps, in the order in which they are launched."""

    # Whether steps are recorded, by their size, and computed in one piece from then on.
    records_steps: bool

    def launch(self, plan: StepPlan) -> Launched:
        """Begin with a step. Whether it is computed now or later is the device's affair. The step
        that was begun last may be launched again: then nobody asks for its first result."""


class Device(Protocol):
    """Hardware that computes one model."""

    # What /info says: cpu, cuda …; where tensors lie, and their type.
    name: str
    torch_device: torch.device
    dtype: torch.dtype
    # What keys and values are kept in.
    cache_dtype: torch.dtype
    # Products of a row do not depend on the other rows, bit for bit.
    is_deterministic: bool
    # Sums over inputs that ranks share are taken in fixed parts, which a tree adds: they have the
    # same bits for every number of ranks that has whole parts.
    sums_in_parts: bool
    # Whether a step may be launched before the previous one has a result.
    runs_behind: bool
    # Arrays of the host, which must not be changed afterwards, to tensors on the device: what the
    # device is given later finds them there.
    upload: Upload
    # Blocks that the cache has beside those of requests: what fills up a pass is written there.
    num_spare_blocks: int

    @property
    def spares_core(self) -> bool:
        """Whether other processes find a core while a step is computed."""

    def check_room(self, nbytes: int, kind: str) -> None:
        """ModelError if weights of `nbytes`, held in `kind`, can not fit."""

    def weight_copies(self) -> AbstractContextManager[WeightCopies]:
        """What fills this device's tensors while weights are loaded. Left without an error, all is
        copied and every action was called. Nothing of it remains, no thread and no memory."""

    def quantized_form(self, shape: tuple[int, int], quantize: str | None) -> Form:
        """How `matrix` holds a weight [N, K] of this shape."""

    def matrix(
        self, weight: Tensor, quantize: str | None, columns: slice = ALL, part: int | None = None
    ) -> Matrix:
        """A weight [N, K] of any type in the best form there is; quantize: int8, int4, fp8 or None.
        Only these columns are kept, as the numbers that the whole weight has there. part: inputs of
        a fixed part, where `sums_in_parts` counts."""

    def gated_matrix(
        self,
        weight: Tensor,
        quantize: str | None,
        activation: Activation,
        has_bias: bool,
    ) -> Matrix:
        """The same of a weight whose outputs are gates and, behind them, what these let through."""

    def embedding(self, weight: Tensor, quantize: str | None) -> EmbeddingTable:
        """The table of token vectors."""

    def add_norm(
        self, hidden: Tensor, delta: Tensor | None, multiplier: float, weight: Tensor, eps: float
    ) -> Tensor:
        """hidden [T, size] += delta * multiplier, in place; returns hidden / rms(hidden) * weight,
        weight [size] in float32."""

    def attention(
        self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float
    ) -> Attention:
        """The best attention for heads of this shape; queries are multiplied by `scale`."""

    def runner(self, model: Model) -> Runner:
        """What computes the steps of a loaded model."""

    def free_bytes(self, step_bytes: int, rehearse: Callable[[], None]) -> "Room":
        """What the KV cache may take. `rehearse` runs the steps that take most memory, of which
        step_bytes are an estimate: a device uses one of the two."""

    def left_bytes(self, cache_bytes: int, room: "Room") -> int:
        """What is left beside a cache that was made and what else there is room for."""

    def collectives(self, meeting: Meeting, slot_bytes: int) -> Collectives:
        """What this rank computes with the others, of which all call this at once; they have tried
        it out when this returns. slot_bytes: what a rank gives at once, at most; more goes in
        pieces. ModelError if it can not be had, RankError as Meeting."""

    def release_memory(self) -> None:
        """Called when there was no memory for a step: what is kept for later ones is given up."""

    def serve(self) -> None:
        """Called when requests are answered: what can be done beside that begins now."""


class Room(NamedTuple):
    """Memory in bytes: for the KV cache, and set aside for the largest step and for steps that are
    recorded; which these are, in words."""

    cache: int
    step: int
    graphs: int = 0
    graphs_note: str = "steps are not recorded"
