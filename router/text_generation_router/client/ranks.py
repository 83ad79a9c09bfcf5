"""What each rank says of itself and of its failures, and whose socket it is."""

import asyncio
import os
import re
import socket
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import grpc
from text_generation_proto import pb

from text_generation_router.errors import GenerationError
from text_generation_router.scheduler.step import (
    CachedBatch,
    GoneShardError,
    GrammarResult,
    LostStepError,
    SilentShardError,
)

# struct ucred: process, user, group.
_CREDENTIALS = struct.Struct("3i")
# What may differ between ranks: their number, their last message, and their cores.
_OF_A_RANK = {"rank", "last_number", "spares_core"}
# How a rank names another rank that made it fail.
_OF_ANOTHER = re.compile(r"shard (\d+) |another shard ")


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


def from_filtered(responses: Sequence[pb.FilterBatchResponse]) -> CachedBatch:
    """The rows that are left, as rank 0 says."""
    rows = responses[0].batch
    return CachedBatch(rows.id, tuple(rows.request_ids))


def from_compiled(responses: Sequence[pb.CompileGrammarResponse]) -> GrammarResult:
    """The answer of all ranks: a grammar is usable if every rank can use it."""
    refused = next((response for response in responses if response.error), responses[0])
    return GrammarResult(refused.error, refused.min_tokens, refused.retry_after_s)


def nothing(responses: Sequence[Any]) -> None:
    """The answers say nothing."""


def outcome_of(task: asyncio.Future[Any]) -> Any:
    """An answer or an exception; None: neither yet."""
    if not task.done():
        return None
    return asyncio.CancelledError() if task.cancelled() else task.exception() or task.result()


# ---- Failures ----


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
            f"Server error: {name_of(silent)} did not answer, though others have: stopped, or hung"
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


def name_of(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"shards {', '.join(most)} and {last}" if most else f"shard {last}"


# ---- Sockets ----


def path_of(url: str) -> str:
    """The path in the address of a shard: `unix:path` or `unix:///path`."""
    path = url.removeprefix("unix:")
    return path[2:] if path.startswith("//") else path


def check_socket(path: str, descriptor: int, address: str) -> None:
    """Raises GenerationError if it is no socket, or if its file or the process that listens is
    another user's; OSError while no process listens, or its backlog is full."""
    state = os.fstat(descriptor)
    if not stat.S_ISSOCK(state.st_mode):
        raise GenerationError(f"{path} is not a socket: give that of a shard")
    _check_user(path, state.st_uid)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        probe.connect(address)
        found = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _check_user(path, _CREDENTIALS.unpack(found)[1])


def _check_user(path: str, user: int) -> None:
    if user not in (0, os.geteuid()):
        raise GenerationError(
            f"{path} is a socket of user {user}, and this router runs as user {os.geteuid()}: "
            "nothing is sent there; remove it, and give the shards a folder that others can not "
            "write to, or run both as one user"
        )


def no_answer(path: str, master_uds_path: str, timeout_s: float) -> str:
    if path == master_uds_path:
        return (
            f"no answer from the shards at {path} within {timeout_s:g} s; "
            "start text-generation-server first, or give its --master-shard-uds-path"
        )
    return (
        f"no answer from the shard at {path} within {timeout_s:g} s, though the one at "
        f"{master_uds_path} answers; see its log for the reason, and restart all shards"
    )
