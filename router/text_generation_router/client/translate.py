"""Between the router's values and the messages of generate.proto; nothing else reads those."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from text_generation_proto import pb

from text_generation_router.request import FinishReason, Pooling, Sampling, StoppingCriteria
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.shards import Advance, CachedBatch, GrammarResult, StepResult

_FINISH_REASONS = {
    pb.FINISH_REASON_NONE: None,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_EOS_TOKEN: FinishReason.EOS_TOKEN,
    pb.FINISH_REASON_ERROR: None,
    pb.FINISH_REASON_STOP_TOKEN: FinishReason.STOP_TOKEN,
}

_POOLINGS = {
    None: pb.POOLING_NONE,
    Pooling.LAST: pb.POOLING_LAST,
    Pooling.MEAN: pb.POOLING_MEAN,
}


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What a shard is; lengths in tokens. See InfoResponse in generate.proto."""

    dtype: str
    device_type: str
    block_size: int
    attention_impl: str
    vocab_size: int
    max_model_len: int
    version: str
    rank: int
    world_size: int
    recompute_at: int | None = None
    quantize: str = ""
    deterministic: bool = False
    prompt_scaled_at: int | None = None
    spares_core: bool = False
    records_steps: bool = False
    last_number: int = 0
    hidden_size: int = 0


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """What the shards have room for, after Warmup; the limits are as given or as decided."""

    num_blocks: int
    max_input_tokens: int
    max_total_tokens: int
    kv_cache_bytes: int
    weights_bytes: int
    # See WarmupResponse; 0: not measured.
    decode_step_ns: int = 0
    prefill_token_ns: int = 0
    prefill_context_ns: int = 0


def to_batch(batch_id: int, entries: Iterable[Entry]) -> pb.Batch:
    """New rows, ready for Prefill."""
    return pb.Batch(id=batch_id, requests=[_to_request(entry) for entry in entries])


def _to_request(entry: Entry) -> pb.Request:
    assert entry.block_table is not None
    request = entry.request
    return pb.Request(
        id=entry.id,
        input_ids=entry.input_ids,
        num_prompt_tokens=len(request.input_ids),
        num_cached_tokens=entry.num_cached_tokens,
        block_table=entry.block_table.block_ids,
        parameters=_to_parameters(request.sampling),
        stopping_parameters=_to_stopping(request.stopping),
        prefill_logprobs=entry.wants_prefill_logprobs,
        top_n_tokens=request.top_n_tokens,
        grammar=request.grammar,
        chunk_len=entry.chunk_len,
        pooling=_POOLINGS[request.pooling],
        score_token_ids=request.score_token_ids,
    )


def _to_parameters(sampling: Sampling) -> pb.NextTokenChooserParameters:
    return pb.NextTokenChooserParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        typical_p=sampling.typical_p,
        min_p=sampling.min_p,
        do_sample=sampling.do_sample,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        watermark=sampling.watermark,
        logit_bias_ids=[token_id for token_id, _ in sampling.logit_bias],
        logit_bias_values=[bias for _, bias in sampling.logit_bias],
    )


def _to_stopping(stopping: StoppingCriteria) -> pb.StoppingCriteriaParameters:
    return pb.StoppingCriteriaParameters(
        max_new_tokens=stopping.max_new_tokens,
        min_new_tokens=stopping.min_new_tokens,
        ignore_eos_token=stopping.ignore_eos_token,
        stop_token_ids=stopping.stop_token_ids,
    )


def to_prefill(
    batch_id: int, entries: Iterable[Entry], cached_batch_id: int | None, advance: Advance | None
) -> pb.PrefillRequest:
    """New rows, and how those of the cached batch go on beside them."""
    return pb.PrefillRequest(
        batch=to_batch(batch_id, entries),
        cached_batch_id=cached_batch_id,
        advance=None if advance is None else _to_advance(advance),
    )


def to_decode(batch_ids: Sequence[int], advance: Advance) -> pb.DecodeRequest:
    """One step for the rows of the batches."""
    return pb.DecodeRequest(batch_ids=batch_ids, advance=_to_advance(advance))


def _to_advance(advance: Advance) -> pb.Advance:
    return pb.Advance(
        grown_request_ids=[request_id for request_id, _ in advance.grown_blocks],
        grown_block_ids=[block_id for _, block_id in advance.grown_blocks],
        chunk_request_ids=[request_id for request_id, _ in advance.chunks],
        chunk_lens=[num_tokens for _, num_tokens in advance.chunks],
        speculate=advance.speculate,
        is_ahead=advance.is_ahead,
    )


def from_step(response: pb.StepResponse, shard_ns: Sequence[int] = ()) -> StepResult:
    """The answer to Prefill or Decode, with the times of all ranks, if there are several."""
    generations = response.generations
    return StepResult(
        request_ids=tuple(generations.request_ids),
        token_ids=tuple(generations.token_ids),
        token_counts=tuple(generations.token_counts),
        logprobs=tuple(generations.logprobs),
        finish_reasons=tuple(_FINISH_REASONS[r] for r in generations.finish_reasons),
        batch=from_cached_batch(response.batch) if response.batch.request_ids else None,
        top_token_counts=tuple(generations.top_token_counts),
        top_token_ids=tuple(generations.top_token_ids),
        top_token_logprobs=tuple(generations.top_token_logprobs),
        prefill_logprobs={p.request_id: tuple(p.logprobs) for p in response.prefill_logprobs},
        prefill_ranks={p.request_id: tuple(p.ranks) for p in response.prefill_logprobs},
        prefill_top_tokens={
            p.request_id: (tuple(p.token_ids), tuple(p.logprobs))
            for p in response.prefill_top_tokens
        },
        pooled_prompts={p.request_id: p.values for p in response.pooled_prompts},
        token_scores={p.request_id: tuple(p.logprobs) for p in response.token_scores},
        errors={error.request_id: error.message for error in response.errors},
        forward_ns=response.forward_ns,
        decode_ns=response.decode_ns,
        concat_ns=response.concat_ns if response.HasField("concat_ns") else None,
        shard_ns=shard_ns,
    )


def from_cached_batch(batch: pb.CachedBatch) -> CachedBatch:
    """A receipt for rows."""
    return CachedBatch(batch.id, tuple(batch.request_ids))


def from_compiled(responses: Sequence[pb.CompileGrammarResponse]) -> GrammarResult:
    """What all ranks say of a grammar: it can be used if every one of them can."""
    refused = next((response for response in responses if response.error), responses[0])
    return GrammarResult(refused.error, refused.min_tokens, refused.retry_after_s)


def from_info(response: pb.InfoResponse) -> ShardInfo:
    """What one shard says about itself."""
    return ShardInfo(
        dtype=response.dtype,
        device_type=response.device_type,
        block_size=response.block_size,
        attention_impl=response.attention_impl,
        vocab_size=response.vocab_size,
        max_model_len=response.max_model_len,
        version=response.version,
        rank=response.rank,
        world_size=response.world_size,
        recompute_at=response.recompute_at if response.HasField("recompute_at") else None,
        quantize=response.quantize,
        deterministic=response.deterministic,
        prompt_scaled_at=(
            response.prompt_scaled_at if response.HasField("prompt_scaled_at") else None
        ),
        spares_core=response.spares_core,
        records_steps=response.records_steps,
        last_number=response.last_number,
        hidden_size=response.hidden_size,
    )


def from_warmup(responses: Sequence[pb.WarmupResponse]) -> WarmupResult:
    """What all ranks have room for: the least of each limit, the sum of the bytes, the times of
    the slowest."""
    return WarmupResult(
        num_blocks=min(r.num_blocks for r in responses),
        max_input_tokens=min(r.max_input_tokens for r in responses),
        max_total_tokens=min(r.max_total_tokens for r in responses),
        kv_cache_bytes=sum(r.kv_cache_bytes for r in responses),
        weights_bytes=sum(r.weights_bytes for r in responses),
        decode_step_ns=max(r.decode_step_ns for r in responses),
        prefill_token_ns=max(r.prefill_token_ns for r in responses),
        prefill_context_ns=max(r.prefill_context_ns for r in responses),
    )
