"""Translates protobuf messages to the engine's values and back."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from text_generation_process.sampling import Sampling
from text_generation_proto import pb

from text_generation_shard.engine.step import (
    NewRequest,
    Pooling,
    StepInput,
    StepOutput,
    WarmupLimits,
    WarmupResult,
)
from text_generation_shard.grammars.grammar import Grammar


def limits_of(message: pb.WarmupRequest) -> WarmupLimits:
    """The router's limits for warm-up."""

    def given(name: Any) -> int | None:
        return int(getattr(message, name)) if message.HasField(name) else None

    return WarmupLimits(
        max_prefill_tokens=message.max_prefill_tokens,
        max_batch_size=message.max_batch_size,
        max_input_tokens=given("max_input_tokens"),
        max_total_tokens=given("max_total_tokens"),
        max_batch_total_tokens=given("max_batch_total_tokens"),
    )


def warmup_response(result: WarmupResult, rank_deadline_ms: int) -> pb.WarmupResponse:
    """The results of warm-up; `rank_deadline_ms`: 0 with one rank."""
    return pb.WarmupResponse(**asdict(result), rank_deadline_ms=rank_deadline_ms)


def step_of(
    message: pb.Advance, runs_on: bool, new_requests: Sequence[NewRequest] = ()
) -> StepInput:
    """The step of an Advance and of new requests. ValueError if parallel fields differ in
    length."""
    return StepInput(
        new_requests=new_requests,
        runs_on=runs_on,
        grown=list(zip(message.grown_request_ids, message.grown_block_ids, strict=True)),
        chunks=list(zip(message.chunk_request_ids, message.chunk_lens, strict=True)),
        speculate=message.speculate,
        is_ahead=message.is_ahead,
    )


def request_of(message: pb.Request, grammar: Grammar | None) -> NewRequest:
    """A request of a Prefill; `grammar`: the compiled form of its grammar. ValueError if parallel
    fields differ in length."""
    chooser, stopping = message.parameters, message.stopping_parameters
    bias = zip(chooser.logit_bias_ids, chooser.logit_bias_values, strict=True)
    return NewRequest(
        id=message.id,
        input_ids=list(message.input_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        block_table=list(message.block_table),
        sampling=Sampling(
            temperature=chooser.temperature,
            top_k=chooser.top_k,
            top_p=chooser.top_p,
            typical_p=chooser.typical_p,
            min_p=chooser.min_p,
            do_sample=chooser.do_sample,
            seed=chooser.seed,
            repetition_penalty=chooser.repetition_penalty,
            frequency_penalty=chooser.frequency_penalty,
            presence_penalty=chooser.presence_penalty,
            watermark=chooser.watermark,
            logit_bias=tuple(bias),
        ),
        max_new_tokens=stopping.max_new_tokens,
        min_new_tokens=stopping.min_new_tokens,
        ignore_eos_token=stopping.ignore_eos_token,
        stop_token_ids=list(stopping.stop_token_ids),
        prefill_logprobs=message.prefill_logprobs,
        top_n_tokens=message.top_n_tokens,
        grammar=grammar,
        chunk_len=message.chunk_len,
        pooling=Pooling(message.pooling),
        score_token_ids=list(message.score_token_ids),
    )


def response_of(result: StepOutput) -> pb.StepResponse:
    """The response without times, batch and digest."""
    return pb.StepResponse(
        generations=pb.Generations(
            request_ids=result.request_ids,
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            finish_reasons=result.finish_reasons,  # type: ignore[arg-type]
            top_token_counts=result.top_token_counts,
            top_token_ids=result.top_token_ids,
            top_token_logprobs=result.top_token_logprobs,
            token_counts=result.token_counts,
        ),
        prefill_logprobs=[
            pb.PrefillLogprobs(request_id=request_id, logprobs=found.logprobs, ranks=found.ranks)
            for request_id, found in result.prompt_logprobs
        ],
        prefill_top_tokens=[
            pb.PrefillTopTokens(
                request_id=request_id,
                token_ids=found.top_token_ids,
                logprobs=found.top_token_logprobs,
            )
            for request_id, found in result.prompt_logprobs
            if found.top_token_ids
        ],
        pooled_prompts=[
            pb.PooledPrompt(request_id=request_id, values=values)
            for request_id, values in result.pooled_prompts
        ],
        token_scores=[
            pb.TokenScores(request_id=request_id, logprobs=values)
            for request_id, values in result.token_scores
        ],
        errors=[
            pb.RequestError(request_id=request_id, message=message)
            for request_id, message in result.errors
        ],
    )
