"""Between the router's values and the messages of generate.proto, which no other file reads."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from text_generation_process.sampling import FinishReason, Pooling
from text_generation_proto import pb

from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.step import CachedBatch, GrammarResult, Plan, StepResult

# By name; the wire's others are no endings.
_FINISH_REASONS = {
    number: FinishReason.__members__.get(name.removeprefix("FINISH_REASON_"))
    for name, number in pb.FinishReason.items()
}
_POOLINGS: dict[Pooling | None, pb.Pooling] = {None: pb.POOLING_NONE}
_POOLINGS |= {own: getattr(pb, f"POOLING_{own.name}") for own in Pooling}


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """Properties of a shard; lengths in tokens. See InfoResponse in generate.proto."""

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
    keeps_state: bool = False
    not_native: str = ""


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """Limits after Warmup, as requested or as the shards have chosen."""

    num_blocks: int
    max_input_tokens: int
    max_total_tokens: int
    kv_cache_bytes: int
    weights_bytes: int
    # See WarmupResponse; 0: not measured.
    decode_step_ns: int = 0
    prefill_token_ns: int = 0
    prefill_context_ns: int = 0
    # How long ranks wait for one another in a step from now on; 0: there is one rank.
    rank_deadline_s: float = 0.0
    num_snapshots: int = 0


def _to_request(entry: Entry) -> pb.Request:
    assert entry.block_table is not None
    request, asked = entry.request, entry.request.asked
    return pb.Request(
        id=entry.id,
        input_ids=entry.input_ids,
        num_prompt_tokens=len(request.input_ids),
        num_cached_tokens=entry.num_cached_tokens,
        block_table=entry.block_table,
        parameters=pb.NextTokenChooserParameters(**request.sampling.to_wire()),
        stopping_parameters=pb.StoppingCriteriaParameters(
            max_new_tokens=request.max_new_tokens,
            min_new_tokens=asked.min_new_tokens or 0,
            ignore_eos_token=asked.ignore_eos_token,
            stop_token_ids=asked.stop_token_ids,
        ),
        prefill_logprobs=entry.wants_prefill_logprobs,
        top_n_tokens=asked.top_n_tokens or 0,
        grammar=request.grammar,
        pooling=_POOLINGS[asked.pooling],
        score_token_ids=asked.score_token_ids,
        snapshot=entry.snapshot,
        snapshot_positions=list(entry.stores),
        snapshot_places=list(entry.stores.values()),
    )


def to_prefill(
    plan: Plan, batch_id: int, cached_batch_id: int | None, trace_context: str, number: int
) -> pb.PrefillRequest:
    """New rows, and what they and the rows of the cached batch compute."""
    return pb.PrefillRequest(
        batch=pb.Batch(id=batch_id, requests=map(_to_request, plan.admitted)),
        cached_batch_id=cached_batch_id,
        step=_to_step(plan),
        trace_context=trace_context,
        number=number,
    )


def to_decode(plan: Plan, batch_id: int, trace_context: str, number: int) -> pb.DecodeRequest:
    """One step for the rows of a batch."""
    return pb.DecodeRequest(
        batch_ids=[batch_id],
        step=_to_step(plan),
        trace_context=trace_context,
        number=number,
    )


def _to_step(plan: Plan) -> pb.Step:
    counts = plan.counts
    grown_request_ids, grown_block_ids = tuple(zip(*plan.grown_blocks, strict=True)) or ((), ())
    return pb.Step(
        request_ids=counts,
        counts=counts.values() if plan.chunks else (),
        speculate=plan.speculate,
        grown_request_ids=grown_request_ids,
        grown_block_ids=grown_block_ids,
        is_ahead=plan.is_ahead,
    )


def from_step(response: pb.StepResponse, shard_ns: Sequence[int] = ()) -> StepResult:
    """The answer to Prefill or Decode, with the times of all ranks, if there are several."""
    generations = response.generations
    return StepResult(
        request_ids=tuple(generations.request_ids),
        token_ids=tuple(generations.token_ids),
        token_counts=tuple(generations.token_counts),
        logprobs=tuple(generations.logprobs),
        finish_reasons=tuple(map(_FINISH_REASONS.__getitem__, generations.finish_reasons)),
        batch=_from_batch(response.batch) if response.batch.request_ids else None,
        top_token_counts=tuple(generations.top_token_counts),
        top_token_ids=tuple(generations.top_token_ids),
        top_token_logprobs=tuple(generations.top_token_logprobs),
        forward_ns=response.forward_ns,
        decode_ns=response.decode_ns,
        concat_ns=response.concat_ns if response.HasField("concat_ns") else None,
        shard_ns=shard_ns,
        **_by_request(response),
    )


def _by_request(response: pb.StepResponse) -> dict[str, Any]:
    """What a step says of prompts, and of requests that failed."""
    if not (
        response.prefill_logprobs
        or response.prefill_top_tokens
        or response.pooled_prompts
        or response.token_scores
        or response.errors
    ):
        return {}  # nearly every step
    return {
        "prefill_logprobs": {p.request_id: tuple(p.logprobs) for p in response.prefill_logprobs},
        "prefill_ranks": {p.request_id: tuple(p.ranks) for p in response.prefill_logprobs},
        "prefill_top_tokens": {
            p.request_id: (tuple(p.token_ids), tuple(p.logprobs))
            for p in response.prefill_top_tokens
        },
        "pooled_prompts": {p.request_id: p.values for p in response.pooled_prompts},
        "token_scores": {p.request_id: tuple(p.logprobs) for p in response.token_scores},
        "errors": {error.request_id: error.message for error in response.errors},
    }


def from_filtered(responses: Sequence[pb.FilterBatchResponse]) -> CachedBatch:
    """The rows that are left, as rank 0 says."""
    return _from_batch(responses[0].batch)


def _from_batch(batch: pb.CachedBatch) -> CachedBatch:
    return CachedBatch(batch.id, tuple(batch.request_ids))


def from_compiled(responses: Sequence[pb.CompileGrammarResponse]) -> GrammarResult:
    """The answer of all ranks: a grammar is usable if every rank can use it."""
    refused = next((response for response in responses if response.error), responses[0])
    return GrammarResult(refused.error, refused.min_tokens, refused.retry_after_s)


def from_info(response: pb.InfoResponse) -> ShardInfo:
    """Properties of one shard."""
    values = {field.name: getattr(response, field.name) for field in fields(ShardInfo)}
    for name in ("recompute_at", "prompt_scaled_at"):
        if not response.HasField(name):
            values[name] = None
    return ShardInfo(**values)


def from_warmup(responses: Sequence[pb.WarmupResponse]) -> WarmupResult:
    """The result of all ranks: the least of each limit, the sum of the bytes, the times of the
    slowest rank."""
    values: dict[str, Any] = {}
    for field in fields(WarmupResult):
        merge = sum if field.name.endswith("_bytes") else min
        merge = max if field.name.endswith("_ns") else merge
        if field.name != "rank_deadline_s":
            values[field.name] = merge(getattr(response, field.name) for response in responses)
    deadline_ms = max(response.rank_deadline_ms for response in responses)
    return WarmupResult(**values, rank_deadline_s=deadline_ms / 1000)
