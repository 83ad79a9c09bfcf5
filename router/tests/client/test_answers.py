"""What all ranks answered, as one answer."""

import asyncio
from dataclasses import replace

import grpc
import pytest
from text_generation_proto import pb
from text_generation_router.client.ranks import ShardInfo, failure, merge_infos
from text_generation_router.client.shards import merge_steps
from text_generation_router.errors import GenerationError
from text_generation_router.scheduler.step import LostStepError, SilentShardError

INFO = ShardInfo("float32", "cpu", 16, "compiled", 100, 2048, "1", 0, 2, spares_core=True)
OTHER = replace(INFO, rank=1)


def error(status: str, details: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode[status], nothing, nothing, details)


OWN = error("INTERNAL", "out of memory")
OF_1 = error("INTERNAL", "shard 1 has aborted message 7")
OF_SOMEBODY = error("INTERNAL", "another shard has failed or did not answer")
DEAD = error("UNAVAILABLE", "Socket closed")


@pytest.mark.parametrize(
    ("outcomes", "sentence", "is_lost"),
    [
        ([OWN, OWN], "Server error: shard 0: out of memory", False),
        # The reason, not what it has done to others.
        ([OF_1, OWN], "Server error: shard 1: out of memory", False),
        ([OF_SOMEBODY, OWN], "Server error: shard 1: out of memory", False),
        ([OF_1, OF_1], "Server error: shard 1: shard 1 has aborted message 7", False),
        ([OF_1, DEAD], "Could not connect to Text Generation server: shard 1: Socket closed", True),
        # It hangs, and was not awaited.
        ([OF_1, None], "Server error: shard 0: shard 1 has aborted message 7", True),
        ([DEAD, None], "Could not connect to Text Generation server: shard 0: Socket closed", True),
        ([pb.StepResponse(), OWN], "Server error: shard 1: out of memory", True),
        ([OWN, DEAD], "Server error: shard 0: out of memory", True),
        (
            [asyncio.CancelledError(), OF_1],
            "Could not connect to Text Generation server: channel closed",
            True,
        ),
    ],
)
def test_why_a_call_has_failed(outcomes: list[object], sentence: str, is_lost: bool) -> None:
    found = failure(outcomes)
    assert isinstance(found, GenerationError) and str(found) == sentence
    assert isinstance(found, LostStepError) is is_lost
    # The client's error names neither the shard's socket nor its files.
    assert "out of memory" not in found.message and "Socket" not in found.message


def test_a_call_that_has_not_failed() -> None:
    assert failure([pb.StepResponse(), pb.StepResponse()]) is None


def test_a_shard_is_silent_while_others_have_answered() -> None:
    found = failure([pb.StepResponse(), None])
    assert isinstance(found, SilentShardError)
    assert "shard 1 did not answer, though others have" in found.message


@pytest.mark.parametrize(
    ("digests", "sentence"),
    [
        ([1, 2], "shard 1 chose other tokens than shard 0 in step 17"),
        ([1, 1, 2, 1], "shard 2 chose other tokens than shard 0 in step 17"),
        ([1, 2, 3, 4], "shards 1, 2 and 3 chose other tokens than shard 0 in step 17"),
    ],
)
def test_ranks_that_chose_other_tokens(digests: list[int], sentence: str) -> None:
    with pytest.raises(LostStepError) as caught:
        merge_steps(17, [pb.StepResponse(digest=digest) for digest in digests])
    # It names only numbers, and clients get it.
    assert str(caught.value).startswith(f"Server error: {sentence}")
    assert sentence in caught.value.message


def test_ranks_that_chose_the_same() -> None:
    merge_steps(17, [pb.StepResponse(digest=2**64 - 1)] * 3)
    generations = pb.Generations(request_ids=[3], token_ids=[4], logprobs=[0.0], finish_reasons=[0])
    first = pb.StepResponse(generations=generations, digest=7, forward_ns=100, decode_ns=1)
    step = merge_steps(17, [first, pb.StepResponse(digest=7, forward_ns=200)])
    assert step.token_ids == (4,) and (step.forward_ns, step.shard_ns) == (100, [101, 200])
    # A single rank has no other to agree with.
    assert merge_steps(17, [pb.StepResponse()]).shard_ns == ()


def test_shards_of_one_model() -> None:
    behind = replace(OTHER, last_number=5, spares_core=False)
    assert merge_infos([INFO, behind]) == replace(INFO, last_number=5, spares_core=False)
    alone = replace(INFO, world_size=1)
    assert merge_infos([alone]) == alone


@pytest.mark.parametrize(
    ("infos", "sentence"),
    [
        ([INFO, replace(OTHER, dtype="bfloat16")], "shard 1 says dtype 'bfloat16', and shard 0"),
        ([INFO, replace(OTHER, vocab_size=101)], "shard 1 says vocab_size 101, and shard 0 says 1"),
        ([INFO, replace(OTHER, version="2")], "shard 1 says version '2', and shard 0 says '1'"),
        ([INFO, replace(OTHER, deterministic=True)], "shard 1 says deterministic True, and shard"),
        ([INFO, replace(OTHER, quantize="int8")], "shard 1 says quantize 'int8', and shard 0 says"),
        ([INFO, replace(OTHER, world_size=4)], "shard 1 is one of 4, and 2 were found; start all"),
        ([INFO], "shard 0 is one of 2, and 1 were found; start all"),
        ([INFO, INFO], "the socket of shard 1 is that of a shard with rank 0; give the socket of"),
        ([OTHER, INFO], "the socket of shard 0 is that of a shard with rank 1; give the socket of"),
    ],
)
def test_shards_that_contradict_each_other(infos: list[ShardInfo], sentence: str) -> None:
    with pytest.raises(GenerationError) as caught:
        merge_infos(infos)
    assert str(caught.value).startswith(sentence)
