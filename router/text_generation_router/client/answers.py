"""Compares and merges the answers of all ranks to one message. Nothing here waits."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import fields, replace

import grpc
from text_generation_proto import pb

from text_generation_router.client import translate
from text_generation_router.client.translate import ShardInfo
from text_generation_router.errors import GenerationError
from text_generation_router.scheduler.shards import (
    GoneShardError,
    LostStepError,
    SilentShardError,
    StepResult,
)

# What may differ between ranks: their number, their last message, and their cores.
_OF_A_RANK = {"rank", "last_number", "spares_core"}
# How a rank names another rank that made it fail.
_OF_ANOTHER = re.compile(r"shard (\d+) |another shard ")


def merge_infos(infos: Sequence[ShardInfo]) -> ShardInfo:
    """The shards' common properties, from rank 0 on. Raises GenerationError, which names the
    shard, if they are not the ranks of one model."""
    first = infos[0]
    for rank, info in enumerate(infos):
        if info.rank != rank:
            raise GenerationError(
                f"the socket of shard {rank} is that of a shard with rank {info.rank}; give the "
                "socket of rank 0"
            )
        if info.world_size != len(infos):
            raise GenerationError(
                f"shard {rank} is one of {info.world_size}, and {len(infos)} were found; start all "
                "of them with the same number of shards"
            )
        for name in (field.name for field in fields(info) if field.name not in _OF_A_RANK):
            theirs, ours = getattr(info, name), getattr(first, name)
            if theirs != ours:
                raise GenerationError(
                    f"shard {rank} says {name} {theirs!r}, and shard 0 says {ours!r}; start all of "
                    "them with the same program, model and options"
                )
    return replace(
        first,
        spares_core=all(info.spares_core for info in infos),
        last_number=max(info.last_number for info in infos),
    )


def merge_steps(number: int, responses: Sequence[pb.StepResponse]) -> StepResult:
    """The tokens that rank 0 has sampled, and the times of all ranks, if there are several.

    Raises LostStepError, which names rank and message, if a rank has sampled other tokens.
    """
    first, *others = responses
    if not others:
        return translate.from_step(first)
    if wrong := [rank for rank, one in enumerate(responses) if one.digest != first.digest]:
        raise LostStepError(
            f"Server error: {_shards(wrong)} chose other tokens than shard 0 in step {number}, so "
            "that it is not known which are right"
        )
    shard_ns = [response.forward_ns + response.decode_ns for response in responses]
    return translate.from_step(first, shard_ns)


def failure(outcomes: Sequence[object]) -> BaseException | None:
    """Why a call to several ranks has failed, None if it has not.

    `outcomes`: the answer or the exception of each rank; None: no answer in time. Returns a
    GoneShardError if a rank has ended, a SilentShardError if none has failed and some are silent,
    a LostStepError if only some have failed. Of several errors it reports the first that does not
    name another rank.
    """
    errors = {rank: one for rank, one in enumerate(outcomes) if isinstance(one, BaseException)}
    silent = [rank for rank, one in enumerate(outcomes) if one is None]
    if not errors and silent:
        return SilentShardError(
            f"Server error: {_shards(silent)} did not answer, though others have: stopped, or hung"
        )
    if not errors:
        return None
    rank = min(errors, key=lambda rank: _is_about_another(rank, errors[rank]))
    error = generation_error(errors[rank], len(errors) < len(outcomes), f"shard {rank}: ")
    if any(map(is_gone, errors.values())) and isinstance(error, GenerationError):
        return GoneShardError(*error.args)
    return error


def is_gone(error: object) -> bool:
    """Whether the call failed because the process has ended."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    return error.code() is grpc.StatusCode.UNAVAILABLE


def generation_error(error: BaseException, is_lost: bool, source: str = "") -> BaseException:
    """The error for a failed call; exceptions other than gRPC's are returned unchanged.

    `is_lost`: other ranks have computed the call. `source` comes before the words of gRPC or the
    shard, which may name sockets and files, and are therefore only for the log.
    """
    if isinstance(error, asyncio.CancelledError):  # gRPC's word for a channel that was closed
        return GoneShardError("Could not connect to Text Generation server: channel closed")
    if not isinstance(error, grpc.aio.AioRpcError):
        return error
    detail = f"{source}{error.details() or error.code().name}"
    if is_gone(error):
        return GoneShardError("Could not connect to Text Generation server", detail)
    return (LostStepError if is_lost else GenerationError)("Server error", detail)


def _is_about_another(rank: int, error: BaseException) -> bool:
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    named = _OF_ANOTHER.match(error.details() or "")
    return named is not None and named[1] != str(rank)


def _shards(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"shards {', '.join(most)} and {last}" if most else f"shard {last}"
