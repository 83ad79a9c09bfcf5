"""Values to messages and back; and that no field of the contract was forgotten."""

import math
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from text_generation_process.sampling import Sampling
from text_generation_proto import pb
from text_generation_router.client import shards
from text_generation_router.client.ranks import ShardInfo, from_info
from text_generation_router.request import FinishReason, GenerateParameters, Pooling, Request
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.step import CachedBatch, Plan

from router.tests.scheduling import make_tokenizer

REQUEST = Request(
    asked=GenerateParameters(
        inputs="",
        min_new_tokens=4,
        stop=("stop",),
        ignore_eos_token=True,
        stop_token_ids=(9, 3),
        top_n_tokens=2,
        pooling=Pooling.MEAN,
        score_token_ids=(8, 3),
    ),
    input_ids=(5, 6, 7),
    sampling=Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        typical_p=0.75,
        min_p=0.125,
        do_sample=True,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=2.0,
        watermark=True,
        logit_bias=((8, -100.0), (9, 1.5)),
    ),
    max_new_tokens=20,
    prefill_logprobs=True,
    grammar="start: /a+/",
)


def make_entry() -> Entry:
    entry = Entry(11, REQUEST, make_tokenizer())
    entry.block_table = [4, 2]
    entry.num_cached_tokens = 2
    entry.snapshot, entry.stores = 3, {2: 5, 3: 4}
    return entry


OLD: dict[str, Any] = {
    "entries": {},
    "chunks": {13: 16, 14: 2, 11: 1},
    "asked": frozenset(),
    "grown_blocks": [(11, 7), (12, 8)],
    "speculate": 3,
    "is_ahead": True,
}


def make_prefill(*entries: Entry) -> Plan:
    """The plan of a Prefill beside old rows."""
    return Plan(list(entries) or [make_entry()], **OLD)


def unset_fields(message: Message) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields} - {
        field.name for field, _ in message.ListFields()
    }


def test_a_request_goes_over_whole() -> None:
    batch = shards.to_prefill(make_prefill(), 3, None, "", 1).batch
    [request] = batch.requests
    assert (batch.id, request.id) == (3, 11)
    assert list(request.input_ids) == [5, 6, 7] and request.num_prompt_tokens == 3
    assert list(request.block_table) == [4, 2] and request.num_cached_tokens == 2
    assert (request.prefill_logprobs, request.top_n_tokens) == (True, 2)
    assert request.grammar == "start: /a+/"
    assert request.snapshot == 3
    assert list(request.snapshot_positions) == [2, 3]
    assert list(request.snapshot_places) == [5, 4]
    assert request.pooling == pb.POOLING_MEAN and list(request.score_token_ids) == [8, 3]
    parameters = request.parameters
    drawing = "temperature", "top_k", "top_p", "typical_p", "min_p", "do_sample", "seed"
    for name in (*drawing, "watermark"):
        assert getattr(parameters, name) == getattr(REQUEST.sampling, name)
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        assert getattr(parameters, name) == getattr(REQUEST.sampling, name)
    assert list(parameters.logit_bias_ids) == [8, 9]
    assert list(parameters.logit_bias_values) == [-100.0, 1.5]
    stopping = request.stopping_parameters
    assert (stopping.max_new_tokens, stopping.min_new_tokens) == (20, 4)
    assert stopping.ignore_eos_token and list(stopping.stop_token_ids) == [9, 3]
    # Every field of the contract must be filled in.
    assert unset_fields(request) == unset_fields(parameters) == unset_fields(stopping) == set()


def test_a_preempted_request_brings_what_it_has_generated() -> None:
    entry = make_entry()
    entry.add([21, 22])
    [request] = shards.to_prefill(Plan([entry], {}, {}, frozenset()), 3, None, "", 1).batch.requests
    assert list(request.input_ids) == [5, 6, 7, 21, 22] and request.num_prompt_tokens == 3
    assert not request.prefill_logprobs, "they were delivered with the first token"


def test_decode() -> None:
    request = shards.to_decode(Plan([], **OLD | {"chunks": {13: 16, 14: 2}}), 4, "", 1)
    assert list(request.batch_ids) == [4]
    check_step(request.step, [13, 14], [16, 2])


def check_step(step: pb.Step, request_ids: list[int], counts: list[int]) -> None:
    assert list(step.grown_request_ids) == [11, 12] and list(step.grown_block_ids) == [7, 8]
    assert list(step.request_ids) == request_ids and list(step.counts) == counts
    assert step.speculate == 3 and step.is_ahead
    assert unset_fields(step) == set()


def test_a_step_that_only_decodes_has_no_counts() -> None:
    entries: Any = dict.fromkeys((7, 5, 6))
    plan = Plan([], entries, {}, frozenset((5, 7)))
    step = shards.to_decode(plan, 4, "", 1).step
    assert list(step.request_ids) == [7, 5] and not step.counts


def test_prefill() -> None:
    request = shards.to_prefill(make_prefill(), 3, 2, "", 1)
    assert (request.batch.id, request.cached_batch_id) == (3, 2)
    assert [one.id for one in request.batch.requests] == [11]
    check_step(request.step, [13, 14, 11], [16, 2, 1])
    first = shards.to_prefill(make_prefill(), 3, None, "", 1)
    assert not first.HasField("cached_batch_id")


def test_a_step_comes_back_as_columns() -> None:
    response = pb.StepResponse(
        generations=pb.Generations(
            request_ids=[1, 2, 3],
            token_ids=[10, 20, 30],
            logprobs=[-0.5, math.nan, -2.0],
            finish_reasons=[
                pb.FINISH_REASON_NONE,
                pb.FINISH_REASON_STOP_TOKEN,
                pb.FINISH_REASON_EOS_TOKEN,
            ],
            top_token_counts=[2, 0, 1],
            top_token_ids=[10, 11, 30],
            top_token_logprobs=[-0.5, -1.5, -2.0],
        ),
        batch=pb.CachedBatch(id=4, request_ids=[1]),
        prefill_logprobs=[pb.PrefillLogprobs(request_id=1, logprobs=[math.nan, -0.25], ranks=[5])],
        pooled_prompts=[pb.PooledPrompt(request_id=2, values=b"1234")],
        token_scores=[pb.TokenScores(request_id=3, logprobs=[-0.5, -8.0])],
        forward_ns=100,
        decode_ns=10,
        concat_ns=0,
    )
    step = shards.from_step(response)
    assert (step.request_ids, step.token_ids) == ((1, 2, 3), (10, 20, 30))
    assert step.logprobs[::2] == (-0.5, -2.0) and math.isnan(step.logprobs[1])
    assert step.finish_reasons == (None, FinishReason.STOP_TOKEN, FinishReason.EOS_TOKEN)
    assert step.prefill_ranks == {1: (5,)}
    assert step.batch == CachedBatch(4, (1,))
    assert list(step.top_tokens()) == [((10, 11), (-0.5, -1.5)), ((), ()), ((30,), (-2.0,))]
    assert math.isnan(step.prefill_logprobs[1][0]) and step.prefill_logprobs[1][1] == -0.25
    assert (step.pooled_prompts, step.token_scores) == ({2: b"1234"}, {3: (-0.5, -8.0)})
    assert (step.forward_ns, step.decode_ns, step.concat_ns) == (100, 10, 0)
    assert list(step.counts) == [1, 1, 1]


def test_a_step_without_remaining_rows() -> None:
    step = shards.from_step(pb.StepResponse())
    assert step.batch is None and step.concat_ns is None and list(step.top_tokens()) == []


def test_every_finish_reason_is_known() -> None:
    expected = {
        pb.FINISH_REASON_NONE: None,
        pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
        pb.FINISH_REASON_EOS_TOKEN: FinishReason.EOS_TOKEN,
        pb.FINISH_REASON_ERROR: None,
        pb.FINISH_REASON_STOP_TOKEN: FinishReason.STOP_TOKEN,
    }
    assert set(expected) == set(pb.FinishReason.values())
    generations = pb.Generations(finish_reasons=list(expected))
    step = shards.from_step(pb.StepResponse(generations=generations))
    assert step.finish_reasons == tuple(expected.values())


def test_info() -> None:
    some = {FieldDescriptor.CPPTYPE_STRING: "a", FieldDescriptor.CPPTYPE_BOOL: True}
    fields = pb.InfoResponse.DESCRIPTOR.fields
    values = {field.name: some.get(field.cpp_type, field.number) for field in fields}
    response = pb.InfoResponse(**values)
    assert from_info(response) == ShardInfo(**values)
    response.ClearField("recompute_at")
    response.ClearField("prompt_scaled_at")
    info = from_info(response)
    assert info.recompute_at is None and info.prompt_scaled_at is None
