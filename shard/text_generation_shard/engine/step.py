"""The engine's inputs and outputs, as values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from text_generation_process.sampling import Sampling
from torch import Tensor

from text_generation_shard.arrays import Doubles
from text_generation_shard.grammars.constraint import Constraint
from text_generation_shard.grammars.grammar import Grammar


class FinishReason(IntEnum):
    """Why a request ended in this step; numbers as in generate.proto."""

    NONE = 0
    LENGTH = 1
    EOS_TOKEN = 2
    ERROR = 3
    STOP_TOKEN = 4


class Pooling(IntEnum):
    """Which hidden state represents a prompt; numbers as in generate.proto."""

    NONE = 0
    LAST = 1
    MEAN = 2


@dataclass(frozen=True, slots=True)
class WarmupLimits:
    """The router's limits; None: the shard decides. See WarmupRequest."""

    max_prefill_tokens: int
    max_batch_size: int
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_total_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """The shard's limits and timings, named as in WarmupResponse."""

    num_blocks: int
    max_input_tokens: int
    max_total_tokens: int
    kv_cache_bytes: int
    weights_bytes: int
    decode_step_ns: int
    prefill_token_ns: int
    prefill_context_ns: int


class Costs(NamedTuple):
    """The times of steps, in nanoseconds."""

    # A step of one row, and one of a full batch.
    single_ns: int
    full_ns: int
    # What each prompt token adds, and what it adds for every 1024 preceding tokens.
    token_ns: int
    context_ns: int


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that gets a row; see Request in generate.proto."""

    id: int
    input_ids: Sequence[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    block_table: Sequence[int]
    sampling: Sampling
    max_new_tokens: int
    min_new_tokens: int = 0
    ignore_eos_token: bool = False
    stop_token_ids: Sequence[int] = ()
    prefill_logprobs: bool = False
    top_n_tokens: int = 0
    grammar: Grammar | None = None
    # Tokens after num_cached_tokens that the first step computes; 0: all.
    chunk_len: int = 0
    pooling: Pooling = Pooling.NONE
    # Tokens whose log-probabilities as the first new token are returned.
    score_token_ids: Sequence[int] = ()

    @property
    def first_end(self) -> int:
        """Input tokens whose KV is in the cache after the first step of this request."""
        if self.chunk_len:
            return self.num_cached_tokens + self.chunk_len
        return len(self.input_ids)

    def constraint(self) -> Constraint | None:
        """The state of its grammar after the tokens generated before a preemption."""
        if self.grammar is None:
            return None
        # A grammar can not ignore an end token; it delays it as long as possible.
        least = self.max_new_tokens if self.ignore_eos_token else self.min_new_tokens
        generated = self.input_ids[self.num_prompt_tokens :]
        return Constraint(self.grammar, generated, self.max_new_tokens, least)


@dataclass(frozen=True, slots=True)
class StepInput:
    """The scheduled work of one step."""

    # Requests that get rows; their inputs, or the first parts of them, are computed.
    new_requests: Sequence[NewRequest] = ()
    # Whether running requests decode: each with a complete input gets one token or more.
    runs_on: bool = True
    # (request id, new last block).
    grown: Sequence[tuple[int, int]] = ()
    # (request id, number of its next input tokens to compute).
    chunks: Sequence[tuple[int, int]] = ()
    # Most tokens drafted per row.
    speculate: int = 0
    # Sent before the previous step was answered: some requests may have ended.
    is_ahead: bool = False


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of the input tokens computed so far."""

    logprobs: list[float] = field(default_factory=list)
    # The rank of each token but the first among the vocabulary; 1: the most likely.
    ranks: list[int] = field(default_factory=list)
    # The best tokens at each position, if requested: the same number at each, best first.
    top_token_ids: list[int] = field(default_factory=list)
    top_token_logprobs: list[float] = field(default_factory=list)

    def extend(self, other: "PromptLogprobs") -> None:
        """Append those of the next tokens."""
        self.logprobs += other.logprobs
        self.ranks += other.ranks
        self.top_token_ids += other.top_token_ids
        self.top_token_logprobs += other.top_token_logprobs


class PooledPart(NamedTuple):
    """One pass's contribution to a PooledOutput. Its tensors are valid after the pass has ended."""

    # [hidden_size] float64: the sum of the hidden states, or the last one.
    pooled: Tensor | None
    # [ids] float32 log-probabilities.
    scores: Tensor | None


@dataclass(slots=True)
class PooledOutput:
    """The pooled hidden state and token scores of a prompt, as far as computed."""

    request: NewRequest
    scores: list[float] = field(default_factory=list)
    _total: Doubles | None = None

    def add(self, part: PooledPart) -> None:
        """Add the next pass."""
        if part.pooled is not None:
            found: Doubles = part.pooled.numpy()
            self._total = found.copy() if self._total is None else self._total + found
        if part.scores is not None:
            self.scores = part.scores.tolist()

    def pooled(self) -> bytes:
        """PooledPrompt.values; empty: not requested."""
        if self._total is None:
            return b""
        is_mean = self.request.pooling is Pooling.MEAN
        divisor = self.request.num_prompt_tokens if is_mean else 1
        return (self._total / divisor).astype(np.dtype("<f4")).tobytes()


@dataclass(slots=True)
class StepOutput:
    """The tokens of one step; see Generations and StepResponse."""

    # One entry per request that got tokens.
    request_ids: list[int]
    finish_reasons: list[int]
    # One entry per token.
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # One entry per request; empty: one token each.
    token_counts: list[int] = field(default_factory=list)
    top_token_counts: list[int] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top_token_logprobs: list[float] = field(default_factory=list)
    # (request id, those of its whole prompt).
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = field(default_factory=list)
    # (request id, PooledPrompt.values), and (request id, TokenScores.logprobs).
    pooled_prompts: list[tuple[int, bytes]] = field(default_factory=list)
    token_scores: list[tuple[int, list[float]]] = field(default_factory=list)
    # (request id, sentence) of the requests that failed while the step did not.
    errors: list[tuple[int, str]] = field(default_factory=list)
    # Requests that go on.
    running_ids: list[int] = field(default_factory=list)
    forward_ns: int = 0
    decode_ns: int = 0
    total_ns: int = 0
    # The time to give rows to new requests.
    admit_ns: int = 0
