"""The shards over gRPC: every call goes to all ranks, rank 0's tokens count."""

import asyncio
import os
import re
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from text_generation_process.defaults import STARTING_DEADLINE_S
from text_generation_proto import pb, pb_grpc

from text_generation_router.client import translate
from text_generation_router.client.translate import ShardInfo, WarmupResult, from_info
from text_generation_router.errors import GenerationError
from text_generation_router.scheduler.step import (
    CachedBatch,
    GoneShardError,
    GrammarResult,
    LostStepError,
    Plan,
    SilentShardError,
    StepResult,
)

_Answer = TypeVar("_Answer")
_Merge = Callable[[list[Any]], _Answer]

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A unix socket is on this machine: never through http_proxy.
    ("grpc.enable_http_proxy", 0),
    # The descriptor in an address is reused by another socket once this one is closed.
    ("grpc.use_local_subchannel_pool", 1),
]
_POLL_S = 0.02  # a start takes seconds, so that this delays it by nothing
# struct ucred: process, user, group.
_CREDENTIALS = struct.Struct("3i")
_HEALTH_TIMEOUT_S = 4.5  # a healthy shard answers in milliseconds, also during a step
_READY = grpc.ChannelConnectivity.READY
# Once a rank has failed, the other ranks fail at once or complete. A rank without an answer
# within this hangs.
OTHERS_S = 0.5
# What may differ between ranks: their number, their last message, and their cores.
_OF_A_RANK = {"rank", "last_number", "spares_core"}
# How a rank names another rank that made it fail.
_OF_ANOTHER = re.compile(r"shard (\d+) |another shard ")


class ShardedClient:
    """Owns the connections to all ranks and the numbers of messages.

    Messages that all ranks must take in the same order are numbered, in the order in which they
    are sent. A call returns when all ranks have answered, so that no rank still computes a failed
    step when the next one begins. It does not wait for a rank that has ended, or that is silent
    when another one has answered or failed. Failures are GenerationError in TGI's words, and
    LostStepError where a rank may still have computed something.

    One step or `filter_batch` is in flight at a time. Only a Decode with `is_ahead` may follow
    another Decode in flight, and is computed after it.
    """

    def __init__(self, answer_s: float = STARTING_DEADLINE_S) -> None:
        """answer_s: how long the call waits for a rank when another one has answered."""
        self.answer_s = answer_s
        """The same, for later calls."""
        self._ranks: list[Rank] = []
        # No rank has taken a message with a larger number.
        self._last_number = 0

    @classmethod
    async def connect(
        cls, master_uds_path: str, timeout_s: float = 60.0, answer_s: float = STARTING_DEADLINE_S
    ) -> "ShardedClient":
        """Asks the shard at `master_uds_path` for the other sockets and connects to all. Each must
        answer within `answer_s` once it listens, and the others must listen within the same time.

        The first numbered call must be `clear_cache` or `warmup`: the last router may have ended
        before all ranks had taken its last messages, and only these two may skip numbers. Raises
        GenerationError, with a sentence for the user, if a shard is late or another user's.
        """
        client, path = cls(answer_s), master_uds_path
        try:
            async with asyncio.timeout(timeout_s):
                urls = await client._reach(path, await Rank.wait_for(path))
                for path in map(path_of, urls[1:]):
                    await client._reach(path)
        except BaseException as error:
            await client.close()
            if not isinstance(error, (TimeoutError, grpc.aio.AioRpcError)):
                raise
            raise GenerationError(_no_answer(path, master_uds_path, timeout_s)) from error
        return client

    async def _reach(self, path: str, rank: "Rank | None" = None) -> Sequence[str]:
        """Connects to one more shard, when it listens. Returns the addresses of all shards."""
        try:
            async with asyncio.timeout(self.answer_s):
                rank = rank or await Rank.wait_for(path)
                self._ranks.append(rank)
                await rank.channel.channel_ready()
                info: pb.InfoResponse = await rank.stub.Info(pb.InfoRequest())
                found = await rank.stub.ServiceDiscovery(pb.ServiceDiscoveryRequest())
        except TimeoutError as error:
            raise GenerationError(
                f"the shard at {path} listens and has not answered for {self.answer_s:g} s: it "
                "hangs or was stopped; restart all shards"
            ) from error
        self._last_number = max(self._last_number, info.last_number)
        urls: Sequence[str] = found.urls
        return urls

    async def close(self) -> None:
        """Closes the connections; calls in flight fail. May be repeated."""
        ranks, self._ranks = self._ranks, []
        await asyncio.gather(*(rank.close() for rank in ranks))

    @property
    def may_be_gone(self) -> bool:
        """Whether a channel is not connected. It is idle when its shard has ended, but also when it
        was not used for half an hour: the next call connects it again."""
        return any(rank.channel.get_state() is not _READY for rank in self._ranks)

    # ---- Calls ----

    async def info(self) -> ShardInfo:
        """Properties of the shards. Raises GenerationError if they differ."""
        responses = await self._call("Info", pb.InfoRequest(), list, self.answer_s)
        return merge_infos([*map(from_info, responses)])

    async def warmup(self, **limits: int | None) -> WarmupResult:
        """Allocates the KV cache within limits, the fields of WarmupRequest; None leaves one to the
        shards."""
        request = pb.WarmupRequest(**limits, number=self._next_number())
        result = await self._call("Warmup", request, translate.from_warmup, self.answer_s)
        # Ranks wait this long for one another from now on.
        self.answer_s = result.rank_deadline_s or self.answer_s
        return result

    def health(self) -> Coroutine[Any, Any, None]:
        """Returns if every shard is healthy."""
        request = pb.HealthRequest()
        return self._call("Health", request, _nothing, None, timeout=_HEALTH_TIMEOUT_S)

    def step(
        self,
        plan: Plan,
        batch_id: int,
        cached_batch_id: int | None = None,
        trace_context: str = "",
    ) -> Coroutine[Any, Any, StepResult]:
        """Prefill, if there are new rows. With `cached_batch_id` they join that batch, which keeps
        its id. Its rows go on in the same step, before the new ones, which can share the blocks
        written there. If it fails, the cached batch is unchanged and the new rows are free.
        Otherwise Decode: advances the rows of the batch `batch_id` that the plan names.

        The message is on its way when the coroutine waits. `trace_context`: the span above those of
        the shards; empty: they have none.
        """
        number = self._next_number()
        merge = partial(merge_steps, number)
        if plan.admitted:
            prefill = translate.to_prefill(plan, batch_id, cached_batch_id, trace_context, number)
            return self._call("Prefill", prefill, merge, self.answer_s)
        decode = translate.to_decode(plan, batch_id, trace_context, number)
        return _merged([rank.decode(decode) for rank in self._ranks], merge, self.answer_s)

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        """Compiles a grammar in llguidance's form, while steps run. Raises TimeoutError."""
        request = pb.CompileGrammarRequest(grammar=grammar)
        async with asyncio.timeout(timeout_s):
            return await self._call("CompileGrammar", request, translate.from_compiled, None)

    def filter_batch(
        self, batch_id: int, request_ids: Sequence[int]
    ) -> Coroutine[Any, Any, CachedBatch]:
        """Keeps the rows of `request_ids` (not empty) and frees the others."""
        request = pb.FilterBatchRequest(
            batch_id=batch_id, request_ids=request_ids, number=self._next_number()
        )
        return self._call("FilterBatch", request, translate.from_filtered, self.answer_s)

    def clear_cache(self, batch_id: int | None) -> Coroutine[Any, Any, None]:
        """Frees the rows of one batch, or of all; an unknown id is no error."""
        request = pb.ClearCacheRequest(id=batch_id, number=self._next_number())
        return self._call("ClearCache", request, _nothing, self.answer_s)

    def _call(
        self,
        method: str,
        request: Message,
        merge: _Merge[_Answer],
        answer_s: float | None,
        **options: float,
    ) -> Coroutine[Any, Any, _Answer]:
        calls = [getattr(rank.stub, method)(request, **options) for rank in self._ranks]
        return _merged(calls, merge, answer_s)

    def _next_number(self) -> int:
        """For a message that is sent before the next number is taken."""
        self._last_number += 1
        return self._last_number


class Rank:
    """Owns the connection to one rank: a reference to its socket, the channel, and the streaming
    call for Decode, opened when one is needed: a message over it takes half the time of a call of
    its own.

    `address` leads to the checked socket even if another one takes its path later: prompts go only
    to a process of this user, or of root.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError while no process listens, GenerationError if it is another user's."""
        self._descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        # For gRPC, behind `unix:`. A name in /proc leads to the file itself, not to its path.
        self.address = f"/proc/self/fd/{self._descriptor}"
        try:
            _check_socket(path, self._descriptor, self.address)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.channel = grpc.aio.insecure_channel(f"unix:{self.address}", options=_CHANNEL_OPTIONS)
        self.stub = pb_grpc.TextGenerationServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self._decode: Any = None
        # gRPC writes one message and reads one at a time. The locks are fair, so that answers are
        # read in the order of their steps.
        self._writing, self._reading = asyncio.Lock(), asyncio.Lock()

    @classmethod
    async def wait_for(cls, path: str) -> "Rank":
        """The rank, as soon as it listens there."""
        while True:
            try:
                return cls(path)
            except OSError:
                await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Calls in flight fail; `address` is invalid from now on."""
        await self.channel.close(None)
        os.close(self._descriptor)

    async def decode(self, request: pb.DecodeRequest) -> pb.StepResponse:
        """One step. A call that has failed or was cancelled is not used again: it is not known
        whether the shard has taken the steps behind the failed one. Therefore the next message must
        be a `clear_cache`, which may skip numbers."""
        if self._decode is None or self._decode.done():
            self._decode = self.stub.Decode()
        call = self._decode
        try:
            async with self._writing:
                await call.write(request)
            async with self._reading:
                response = await call.read()
        except asyncio.CancelledError:
            call.cancel()
            raise
        if not isinstance(response, pb.StepResponse):
            raise LostStepError("Server error: the shard has ended the call without an answer")
        return response


def path_of(url: str) -> str:
    """The path in the address of a shard: `unix:path` or `unix:///path`."""
    path = url.removeprefix("unix:")
    return path[2:] if path.startswith("//") else path


def _check_socket(path: str, descriptor: int, address: str) -> None:
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


def _no_answer(path: str, master_uds_path: str, timeout_s: float) -> str:
    if path == master_uds_path:
        return (
            f"no answer from the shards at {path} within {timeout_s:g} s; "
            "start text-generation-server first, or give its --master-shard-uds-path"
        )
    return (
        f"no answer from the shard at {path} within {timeout_s:g} s, though the one at "
        f"{master_uds_path} answers; see its log for the reason, and restart all shards"
    )


def _nothing(responses: list[Any]) -> None:
    """The answers say nothing."""


def _merged(
    calls: Sequence[Awaitable[Any]], merge: _Merge[_Answer], answer_s: float | None
) -> Coroutine[Any, Any, _Answer]:
    """The answers of all ranks, in order, as one; raises the failure of one. answer_s: see
    ShardedClient; None: no limit."""
    if len(calls) == 1:
        # A task would cost every step one more turn of the event loop.
        return _one(calls[0], merge)
    return _several([asyncio.ensure_future(call) for call in calls], merge, answer_s)


async def _one(call: Awaitable[Any], merge: _Merge[_Answer]) -> _Answer:
    try:
        return merge([await call])
    except (asyncio.CancelledError, grpc.aio.AioRpcError) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # this task is cancelled
        raise _generation_error(error, is_lost=False) from error


async def _several(
    tasks: Sequence[asyncio.Future[Any]], merge: _Merge[_Answer], answer_s: float | None
) -> _Answer:
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done, waiting = await asyncio.wait(
            tasks, timeout=answer_s, return_when=asyncio.FIRST_EXCEPTION
        )
        failed = [one for one in map(_outcome, done) if isinstance(one, BaseException)]
        if waiting and failed and not any(map(_is_gone, failed)):
            await asyncio.wait(waiting, timeout=OTHERS_S)
    finally:
        outcomes = [_outcome(task) for task in tasks]
        for task in tasks:
            task.cancel()
    if (error := failure(outcomes)) is not None:
        raise error
    return merge(outcomes)


def _outcome(task: asyncio.Future[Any]) -> Any:
    """An answer or an exception; None: neither yet."""
    if not task.done():
        return None
    return asyncio.CancelledError() if task.cancelled() else task.exception() or task.result()


# ---- The answers of all ranks as one ----


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
    error = _generation_error(errors[rank], len(errors) < len(outcomes), f"shard {rank}: ")
    if any(map(_is_gone, errors.values())) and isinstance(error, GenerationError):
        return GoneShardError(*error.args)
    return error


def _is_gone(error: object) -> bool:
    """Whether the call failed because the process has ended."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    return error.code() is grpc.StatusCode.UNAVAILABLE


def _generation_error(error: BaseException, is_lost: bool, source: str = "") -> BaseException:
    """The error for a failed call; exceptions other than gRPC's are returned unchanged.

    `is_lost`: other ranks have computed the call. `source` comes before the words of gRPC or the
    shard, which may name sockets and files, and are therefore only for the log.
    """
    if isinstance(error, asyncio.CancelledError):  # gRPC's word for a channel that was closed
        return GoneShardError("Could not connect to Text Generation server: channel closed")
    if not isinstance(error, grpc.aio.AioRpcError):
        return error
    detail = f"{source}{error.details() or error.code().name}"
    if _is_gone(error):
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
