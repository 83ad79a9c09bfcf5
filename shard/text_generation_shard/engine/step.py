"""What goes into and comes out of the engine: values only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from torch import Tensor

from text_generation_shard.arrays import Doubles
from text_generation_shard.grammars.constraint import Grammar
from text_generation_shard.grammars.guard import AnyConstraint, begin
from text_generation_shard.sampling.params import SamplingParams


class FinishReason(IntEnum):
    """Why a request ended in this step; the numbers of generate.proto."""

    NONE = 0
    LENGTH = 1
    EOS_TOKEN = 2
    ERROR = 3
    STOP_TOKEN = 4


class Pooling(IntEnum):
    """Which hidden state stands for a prompt; the numbers of generate.proto."""

    NONE = 0
    LAST = 1
    MEAN = 2


@dataclass(frozen=True, slots=True)
class WarmupLimits:
    """What the router wants; None: the shard decides. See WarmupRequest."""

    max_prefill_tokens: int
    max_batch_size: int
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_total_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """What the shard decided and measured; see WarmupResponse."""

    num_blocks: int
    max_input_tokens: int
    max_total_tokens: int
    kv_cache_bytes: int
    weights_bytes: int
    decode_step_ns: int
    prefill_token_ns: int
    prefill_context_ns: int


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that gets a row; see Request in generate.proto."""

    id: int
    input_ids: Sequence[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    block_table: Sequence[int]
    sampling: SamplingParams
    max_new_tokens: int
    min_new_tokens: int = 0
    ignore_eos_token: bool = False
    stop_token_ids: Sequence[int] = ()
    prefill_logprobs: bool = False
    top_n_tokens: int = 0
    grammar: Grammar | None = None
    # Tokens behind num_cached_tokens that are computed at once; 0: all.
    chunk_len: int = 0
    pooling: Pooling = Pooling.NONE
    # Whose log-probabilities as the first token are told.
    score_token_ids: Sequence[int] = ()

    @property
    def first_end(self) -> int:
        """Tokens whose KV is there once the pass that brings this request is done."""
        if self.chunk_len:
            return self.num_cached_tokens + self.chunk_len
        return len(self.input_ids)

    def constraint(self) -> AnyConstraint | None:
        """Its position in its grammar, behind what was generated before a preemption."""
        if self.grammar is None:
            return None
        # An end token is not ignored for a grammar, but it comes as late as can be.
        least = self.max_new_tokens if self.ignore_eos_token else self.min_new_tokens
        generated = self.input_ids[self.num_prompt_tokens :]
        return begin(self.grammar, generated, self.max_new_tokens, least)


@dataclass(frozen=True, slots=True)
class StepInput:
    """What is computed in one step."""

    # Requests that get rows; their inputs, or the first parts of them, are computed.
    new_requests: Sequence[NewRequest] = ()
    # Whether those that run go on: a token or more for each whose input is computed.
    runs_on: bool = True
    # (request id, new last block).
    grown: Sequence[tuple[int, int]] = ()
    # (request id, tokens of its input): parts of inputs that are not computed yet.
    chunks: Sequence[tuple[int, int]] = ()
    # Tokens that may be guessed of a row.
    speculate: int = 0
    # Sent before the step before was answered: requests may have ended meanwhile.
    is_ahead: bool = False


@dataclass(slots=True)
class PromptLogprobs:
    """Of the tokens of an input, as far as they are computed."""

    logprobs: list[float] = field(default_factory=list)
    # Of each token but the first of a prompt, its place among all, the likeliest at 1.
    ranks: list[int] = field(default_factory=list)
    # Of the best tokens at each place, if the request wants any: as many everywhere, best first.
    top_token_ids: list[int] = field(default_factory=list)
    top_token_logprobs: list[float] = field(default_factory=list)

    def extend(self, other: "PromptLogprobs") -> None:
        """With those of the tokens that follow."""
        self.logprobs += other.logprobs
        self.ranks += other.ranks
        self.top_token_ids += other.top_token_ids
        self.top_token_logprobs += other.top_token_logprobs


class PartReading(NamedTuple):
    """What a pass brought of what a request wants to know of its prompt; on the host once the pass
    is known to be computed."""

    # [hidden_size] float64: the sum of the hidden states, or the last of them.
    pooled: Tensor | None
    # [ids] float32.
    scores: Tensor | None


@dataclass(slots=True)
class Reading:
    """What a request wants to know of its prompt, as far as that is computed."""

    request: NewRequest
    scores: list[float] = field(default_factory=list)
    _total: Doubles | None = None

    def add(self, part: PartReading) -> None:
        """With what the next pass brought."""
        if part.pooled is not None:
            found: Doubles = part.pooled.numpy()
            self._total = found.copy() if self._total is None else self._total + found
        if part.scores is not None:
            self.scores = part.scores.tolist()

    def pooled(self) -> bytes:
        """See PooledPrompt; empty: it is not wanted."""
        if self._total is None:
            return b""
        is_mean = self.request.pooling is Pooling.MEAN
        divisor = self.request.num_prompt_tokens if is_mean else 1
        return (self._total / divisor).astype(np.dtype("<f4")).tobytes()


@dataclass(slots=True)
class StepOutput:
    """The tokens of one step; see Generations and StepResponse."""

    # One entry a request that got tokens.
    request_ids: list[int]
    finish_reasons: list[int]
    # One entry a token.
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # One entry a request; empty: one token each.
    token_counts: list[int] = field(default_factory=list)
    top_token_counts: list[int] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top_token_logprobs: list[float] = field(default_factory=list)
    # (request id, one log-probability per prompt token).
    prefill_logprobs: list[tuple[int, list[float]]] = field(default_factory=list)
    # The ranks of the same prompts: see PromptLogprobs.
    prefill_ranks: list[list[int]] = field(default_factory=list)
    # (request id, ids, log-probabilities) of the best tokens in place of each but the first, for
    # prompts of requests that want them: one after the other, as many in each place.
    prefill_top_tokens: list[tuple[int, list[int], list[float]]] = field(default_factory=list)
    # (request id, PooledPrompt.values), and (request id, TokenScores.logprobs).
    pooled_prompts: list[tuple[int, bytes]] = field(default_factory=list)
    token_scores: list[tuple[int, list[float]]] = field(default_factory=list)
    # (request id, sentence) of the requests that failed alone.
    errors: list[tuple[int, str]] = field(default_factory=list)
    # Who runs on.
    running_ids: list[int] = field(default_factory=list)
    forward_ns: int = 0
    decode_ns: int = 0
    total_ns: int = 0
    # What giving rows to new requests took.
    admit_ns: int = 0
