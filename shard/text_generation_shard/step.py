"""What goes into and comes out of the engine: values only."""

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
    """What the shard decided; see WarmupResponse."""

    num_blocks: int
    max_input_tokens: int
    max_total_tokens: int
    kv_cache_bytes: int
    weights_bytes: int


@dataclass(slots=True)
class StepResult:
    """The tokens of one step, one entry a request; see Generations and StepResponse."""

    request_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reasons: list[int]
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
