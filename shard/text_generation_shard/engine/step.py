"""What goes into and comes out of the engine: values only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum


class FinishReason(IntEnum):
    """Why a request ended in this step; the numbers of generate.proto."""

    NONE = 0
    LENGTH = 1
    EOS_TOKEN = 2
    ERROR = 3


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
class Advance:
    """How the rows of a batch that is there go on in a step; see Advance in generate.proto."""

    # (request id, new last block).
    grown: Sequence[tuple[int, int]] = ()
    # (request id, tokens of its input).
    chunks: Sequence[tuple[int, int]] = ()
    speculate: int = 0
    is_ahead: bool = False


@dataclass(slots=True)
class StepResult:
    """The tokens of one step; see Generations and StepResponse."""

    # One entry a request that got tokens.
    request_ids: list[int]
    finish_reasons: list[int]
    # One entry a token.
    token_ids: list[int]
    logprobs: list[float]
    # One entry a request; empty: one token each.
    token_counts: list[int] = field(default_factory=list)
    top_token_counts: list[int] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top_token_logprobs: list[float] = field(default_factory=list)
    # (request id, one log-probability per prompt token).
    prefill_logprobs: list[tuple[int, list[float]]] = field(default_factory=list)
    # (request id, sentence) of the requests that failed alone.
    errors: list[tuple[int, str]] = field(default_factory=list)
    batch_id: int = 0
    # Who runs on; empty: nobody, and the batch is gone.
    running_ids: list[int] = field(default_factory=list)
    forward_ns: int = 0
    decode_ns: int = 0
    total_ns: int = 0
    concat_ns: int | None = None
