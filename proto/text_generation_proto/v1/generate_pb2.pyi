from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_NONE: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_NONE: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_EOS_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
POOLING_NONE: Pooling
POOLING_LAST: Pooling
POOLING_MEAN: Pooling
FINISH_REASON_NONE: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_EOS_TOKEN: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("dtype", "device_type", "block_size", "attention_impl", "vocab_size", "max_model_len", "version", "rank", "world_size", "recompute_at", "quantize", "deterministic", "prompt_scaled_at", "spares_core", "records_steps", "last_number", "hidden_size", "keeps_state", "not_native")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_IMPL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_AT_FIELD_NUMBER: _ClassVar[int]
    QUANTIZE_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCALED_AT_FIELD_NUMBER: _ClassVar[int]
    SPARES_CORE_FIELD_NUMBER: _ClassVar[int]
    RECORDS_STEPS_FIELD_NUMBER: _ClassVar[int]
    LAST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    KEEPS_STATE_FIELD_NUMBER: _ClassVar[int]
    NOT_NATIVE_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    device_type: str
    block_size: int
    attention_impl: str
    vocab_size: int
    max_model_len: int
    version: str
    rank: int
    world_size: int
    recompute_at: int
    quantize: str
    deterministic: bool
    prompt_scaled_at: int
    spares_core: bool
    records_steps: bool
    last_number: int
    hidden_size: int
    keeps_state: bool
    not_native: str
    def __init__(self, dtype: _Optional[str] = ..., device_type: _Optional[str] = ..., block_size: _Optional[int] = ..., attention_impl: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., version: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., recompute_at: _Optional[int] = ..., quantize: _Optional[str] = ..., deterministic: bool = ..., prompt_scaled_at: _Optional[int] = ..., spares_core: bool = ..., records_steps: bool = ..., last_number: _Optional[int] = ..., hidden_size: _Optional[int] = ..., keeps_state: bool = ..., not_native: _Optional[str] = ...) -> None: ...

class ServiceDiscoveryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceDiscoveryResponse(_message.Message):
    __slots__ = ("urls",)
    URLS_FIELD_NUMBER: _ClassVar[int]
    urls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, urls: _Optional[_Iterable[str]] = ...) -> None: ...

class ClearCacheRequest(_message.Message):
    __slots__ = ("id", "number")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    id: int
    number: int
    def __init__(self, id: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class ClearCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompileGrammarRequest(_message.Message):
    __slots__ = ("grammar",)
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    grammar: str
    def __init__(self, grammar: _Optional[str] = ...) -> None: ...

class CompileGrammarResponse(_message.Message):
    __slots__ = ("error", "min_tokens", "retry_after_s")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    error: str
    min_tokens: int
    retry_after_s: int
    def __init__(self, error: _Optional[str] = ..., min_tokens: _Optional[int] = ..., retry_after_s: _Optional[int] = ...) -> None: ...

class NextTokenChooserParameters(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "typical_p", "do_sample", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty", "watermark", "logit_bias_ids", "logit_bias_values", "min_p")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    DO_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    typical_p: float
    do_sample: bool
    seed: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    watermark: bool
    logit_bias_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias_values: _containers.RepeatedScalarFieldContainer[float]
    min_p: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., do_sample: bool = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., watermark: bool = ..., logit_bias_ids: _Optional[_Iterable[int]] = ..., logit_bias_values: _Optional[_Iterable[float]] = ..., min_p: _Optional[float] = ...) -> None: ...

class StoppingCriteriaParameters(_message.Message):
    __slots__ = ("max_new_tokens", "min_new_tokens", "ignore_eos_token", "stop_token_ids")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    min_new_tokens: int
    ignore_eos_token: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., ignore_eos_token: bool = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "input_ids", "num_prompt_tokens", "num_cached_tokens", "block_table", "parameters", "stopping_parameters", "prefill_logprobs", "top_n_tokens", "grammar", "pooling", "score_token_ids", "snapshot", "snapshot_positions", "snapshot_places")
    ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STOPPING_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    SCORE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_PLACES_FIELD_NUMBER: _ClassVar[int]
    id: int
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    block_table: _containers.RepeatedScalarFieldContainer[int]
    parameters: NextTokenChooserParameters
    stopping_parameters: StoppingCriteriaParameters
    prefill_logprobs: bool
    top_n_tokens: int
    grammar: str
    pooling: Pooling
    score_token_ids: _containers.RepeatedScalarFieldContainer[int]
    snapshot: int
    snapshot_positions: _containers.RepeatedScalarFieldContainer[int]
    snapshot_places: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., input_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., block_table: _Optional[_Iterable[int]] = ..., parameters: _Optional[_Union[NextTokenChooserParameters, _Mapping]] = ..., stopping_parameters: _Optional[_Union[StoppingCriteriaParameters, _Mapping]] = ..., prefill_logprobs: bool = ..., top_n_tokens: _Optional[int] = ..., grammar: _Optional[str] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., score_token_ids: _Optional[_Iterable[int]] = ..., snapshot: _Optional[int] = ..., snapshot_positions: _Optional[_Iterable[int]] = ..., snapshot_places: _Optional[_Iterable[int]] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("id", "requests")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    id: int
    requests: _containers.RepeatedCompositeFieldContainer[Request]
    def __init__(self, id: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[Request, _Mapping]]] = ...) -> None: ...

class CachedBatch(_message.Message):
    __slots__ = ("id", "request_ids")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    id: int
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., request_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FilterBatchRequest(_message.Message):
    __slots__ = ("batch_id", "request_ids", "number")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    number: int
    def __init__(self, batch_id: _Optional[int] = ..., request_ids: _Optional[_Iterable[int]] = ..., number: _Optional[int] = ...) -> None: ...

class FilterBatchResponse(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: CachedBatch
    def __init__(self, batch: _Optional[_Union[CachedBatch, _Mapping]] = ...) -> None: ...

class WarmupRequest(_message.Message):
    __slots__ = ("max_prefill_tokens", "max_batch_size", "max_input_tokens", "max_total_tokens", "max_batch_total_tokens", "number", "num_snapshots")
    MAX_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    max_prefill_tokens: int
    max_batch_size: int
    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int
    number: int
    num_snapshots: int
    def __init__(self, max_prefill_tokens: _Optional[int] = ..., max_batch_size: _Optional[int] = ..., max_input_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., max_batch_total_tokens: _Optional[int] = ..., number: _Optional[int] = ..., num_snapshots: _Optional[int] = ...) -> None: ...

class WarmupResponse(_message.Message):
    __slots__ = ("num_blocks", "max_input_tokens", "max_total_tokens", "kv_cache_bytes", "weights_bytes", "decode_step_ns", "prefill_token_ns", "prefill_context_ns", "rank_deadline_ms", "num_snapshots")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CONTEXT_NS_FIELD_NUMBER: _ClassVar[int]
    RANK_DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    max_input_tokens: int
    max_total_tokens: int
    kv_cache_bytes: int
    weights_bytes: int
    decode_step_ns: int
    prefill_token_ns: int
    prefill_context_ns: int
    rank_deadline_ms: int
    num_snapshots: int
    def __init__(self, num_blocks: _Optional[int] = ..., max_input_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., kv_cache_bytes: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., decode_step_ns: _Optional[int] = ..., prefill_token_ns: _Optional[int] = ..., prefill_context_ns: _Optional[int] = ..., rank_deadline_ms: _Optional[int] = ..., num_snapshots: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("request_ids", "counts", "speculate", "grown_request_ids", "grown_block_ids", "is_ahead")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    GROWN_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    GROWN_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    speculate: int
    grown_request_ids: _containers.RepeatedScalarFieldContainer[int]
    grown_block_ids: _containers.RepeatedScalarFieldContainer[int]
    is_ahead: bool
    def __init__(self, request_ids: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., speculate: _Optional[int] = ..., grown_request_ids: _Optional[_Iterable[int]] = ..., grown_block_ids: _Optional[_Iterable[int]] = ..., is_ahead: bool = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("batch", "cached_batch_id", "step", "number", "trace_context")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CACHED_BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    batch: Batch
    cached_batch_id: int
    step: Step
    number: int
    trace_context: str
    def __init__(self, batch: _Optional[_Union[Batch, _Mapping]] = ..., cached_batch_id: _Optional[int] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., number: _Optional[int] = ..., trace_context: _Optional[str] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("batch_ids", "step", "number", "trace_context")
    BATCH_IDS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    batch_ids: _containers.RepeatedScalarFieldContainer[int]
    step: Step
    number: int
    trace_context: str
    def __init__(self, batch_ids: _Optional[_Iterable[int]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., number: _Optional[int] = ..., trace_context: _Optional[str] = ...) -> None: ...

class Generations(_message.Message):
    __slots__ = ("request_ids", "token_ids", "logprobs", "finish_reasons", "top_token_counts", "top_token_ids", "top_token_logprobs", "token_counts")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    finish_reasons: _containers.RepeatedScalarFieldContainer[FinishReason]
    top_token_counts: _containers.RepeatedScalarFieldContainer[int]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_token_logprobs: _containers.RepeatedScalarFieldContainer[float]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., finish_reasons: _Optional[_Iterable[_Union[FinishReason, str]]] = ..., top_token_counts: _Optional[_Iterable[int]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_token_logprobs: _Optional[_Iterable[float]] = ..., token_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillLogprobs(_message.Message):
    __slots__ = ("request_id", "logprobs", "ranks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillTopTokens(_message.Message):
    __slots__ = ("request_id", "token_ids", "logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PooledPrompt(_message.Message):
    __slots__ = ("request_id", "values")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    values: bytes
    def __init__(self, request_id: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class TokenScores(_message.Message):
    __slots__ = ("request_id", "logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request_id: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("request_id", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    message: str
    def __init__(self, request_id: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("generations", "batch", "prefill_logprobs", "forward_ns", "decode_ns", "total_ns", "concat_ns", "errors", "digest", "prefill_top_tokens", "pooled_prompts", "token_scores")
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    CONCAT_NS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOLED_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SCORES_FIELD_NUMBER: _ClassVar[int]
    generations: Generations
    batch: CachedBatch
    prefill_logprobs: _containers.RepeatedCompositeFieldContainer[PrefillLogprobs]
    forward_ns: int
    decode_ns: int
    total_ns: int
    concat_ns: int
    errors: _containers.RepeatedCompositeFieldContainer[RequestError]
    digest: int
    prefill_top_tokens: _containers.RepeatedCompositeFieldContainer[PrefillTopTokens]
    pooled_prompts: _containers.RepeatedCompositeFieldContainer[PooledPrompt]
    token_scores: _containers.RepeatedCompositeFieldContainer[TokenScores]
    def __init__(self, generations: _Optional[_Union[Generations, _Mapping]] = ..., batch: _Optional[_Union[CachedBatch, _Mapping]] = ..., prefill_logprobs: _Optional[_Iterable[_Union[PrefillLogprobs, _Mapping]]] = ..., forward_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., concat_ns: _Optional[int] = ..., errors: _Optional[_Iterable[_Union[RequestError, _Mapping]]] = ..., digest: _Optional[int] = ..., prefill_top_tokens: _Optional[_Iterable[_Union[PrefillTopTokens, _Mapping]]] = ..., pooled_prompts: _Optional[_Iterable[_Union[PooledPrompt, _Mapping]]] = ..., token_scores: _Optional[_Iterable[_Union[TokenScores, _Mapping]]] = ...) -> None: ...
