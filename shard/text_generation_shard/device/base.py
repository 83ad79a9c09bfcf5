"""The interface between the engine, the model and the hardware.

A device is one object: a `reference.device.Device`, which is also the specification in plain torch.
It creates everything that depends on the hardware: weights in the form it multiplies, attention
with its KV cache, and the runner that computes steps. Code outside the device's folder uses only
this interface.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import NO_INTS, Ints, Tokens
from text_generation_shard.device.forward import Attention, ForwardBatch, RowState
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
