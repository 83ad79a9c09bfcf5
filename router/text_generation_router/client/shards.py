"""The shards over gRPC: every call goes to all ranks, rank 0's tokens count."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, TypeVar

import grpc
from text_generation_proto import pb, pb_grpc

from text_generation_router.client import translate
from text_generation_router.client.shard_socket import ShardSocket, path_of
from text_generation_router.client.translate import ShardInfo, WarmupResult
from text_generation_router.errors import GenerationError
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.shards import (
    Advance,
    CachedBatch,
    GrammarResult,
    LostStepError,
    StepResult,
)

__all__ = ["ShardInfo", "ShardedClient", "WarmupResult"]

_Response = TypeVar("_Response")

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A unix socket is on this machine, whatever http_proxy says.
    ("grpc.enable_http_proxy", 0),
    # The number in an address is given to another socket once this one is closed.
    ("grpc.use_local_subchannel_pool", 1),
]
_HEALTH_TIMEOUT_S = 5.0


class ShardedClient:
    """Owns one channel per rank; implements `scheduler.shards.Shards`.

    A call returns when all ranks have answered, so that no rank is still busy with a failed step
    when the next one begins. Failures are GenerationError in TGI's words.
    """

    def __init__(self, channels: list[grpc.aio.Channel], sockets: list[ShardSocket]) -> None:
        self._channels = channels
        self._sockets = sockets
        self._stubs = [_stub(channel) for channel in channels]
        self._decodes = [DecodeCall(stub) for stub in self._stubs]

    @classmethod
    async def connect(cls, master_uds_path: str, timeout_s: float = 60.0) -> "ShardedClient":
        """Asks the shard that listens on `master_uds_path` for the others and connects to all.

        Raises GenerationError, with a sentence for the user, if they are not there in time, or are
        another user's.
        """
        client = cls(channels := [], sockets := [])
        try:
            async with asyncio.timeout(timeout_s):
                sockets.append(await ShardSocket.wait_for(master_uds_path))
                channels.append(_open(sockets[0]))
                await channels[0].channel_ready()
                request = pb.ServiceDiscoveryRequest()
                urls = (await _stub(channels[0]).ServiceDiscovery(request)).urls
                for url in urls[1:]:
                    sockets.append(await ShardSocket.wait_for(path_of(url)))
                    channels.append(_open(sockets[-1]))
                await asyncio.gather(*(channel.channel_ready() for channel in channels))
        except BaseException as error:
            await client.close()
            if not isinstance(error, (TimeoutError, grpc.aio.AioRpcError)):
                raise
            raise GenerationError(
                f"no answer from the shards at {master_uds_path} within {timeout_s:g} s; "
                "start text-generation-server first, or give its --master-shard-uds-path"
            ) from error
        return cls(channels, sockets)

    async def close(self) -> None:
        """Closes the channels; calls under way fail. May be repeated."""
        await asyncio.gather(*(channel.close(None) for channel in self._channels))
        while self._sockets:
            self._sockets.pop().close()

    async def info(self) -> ShardInfo:
        """What rank 0 says about itself."""
        [response, *_] = await _all(stub.Info(pb.InfoRequest()) for stub in self._stubs)
        return translate.from_info(response)

    async def warmup(
        self,
        max_prefill_tokens: int,
        max_batch_size: int,
        max_input_tokens: int | None = None,
        max_total_tokens: int | None = None,
        max_batch_total_tokens: int | None = None,
    ) -> WarmupResult:
        """Allocates the KV cache; None leaves a limit to the shards. All in tokens or rows."""
        request = pb.WarmupRequest(
            max_prefill_tokens=max_prefill_tokens,
            max_batch_size=max_batch_size,
            max_input_tokens=max_input_tokens,
            max_total_tokens=max_total_tokens,
            max_batch_total_tokens=max_batch_total_tokens,
        )
        return translate.from_warmup(await _all(stub.Warmup(request) for stub in self._stubs))

    async def health(self) -> None:
        """Returns while every shard takes work."""
        request = pb.HealthRequest()
        await _all(stub.Health(request, timeout=_HEALTH_TIMEOUT_S) for stub in self._stubs)

    async def prefill(
        self,
        batch_id: int,
        entries: Sequence[Entry],
        cached_batch_id: int | None,
        advance: Advance | None = None,
    ) -> StepResult:
        """See `Shards.prefill`."""
        request = translate.to_prefill(batch_id, entries, cached_batch_id, advance)
        [response, *_] = await _all(stub.Prefill(request) for stub in self._stubs)
        return translate.from_step(response)

    async def decode(self, batch_ids: Sequence[int], advance: Advance) -> StepResult:
        """See `Shards.decode`."""
        request = translate.to_decode(batch_ids, advance)
        [response, *_] = await _all(decode(request) for decode in self._decodes)
        return translate.from_step(response)

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        """See `Shards.compile_grammar`."""
        request = pb.CompileGrammarRequest(grammar=grammar)
        async with asyncio.timeout(timeout_s):
            responses = await _all(stub.CompileGrammar(request) for stub in self._stubs)
        return translate.from_compiled(responses)

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        """See `Shards.filter_batch`."""
        request = pb.FilterBatchRequest(batch_id=batch_id, request_ids=request_ids)
        [response, *_] = await _all(stub.FilterBatch(request) for stub in self._stubs)
        return translate.from_cached_batch(response.batch)

    async def clear_cache(self, batch_id: int | None) -> None:
        """See `Shards.clear_cache`."""
        request = pb.ClearCacheRequest(id=batch_id)
        await _all(stub.ClearCache(request) for stub in self._stubs)


class DecodeCall:
    """Owns the call to one rank that decode steps go through, opened when one is needed.

    A message over an open call takes half the time of a call of its own: with a step of 7 ms
    between, 0.46 ms for both ways instead of 0.96. Several may be under way.
    """

    def __init__(self, stub: pb_grpc.TextGenerationServiceStub) -> None:
        self._stub = stub
        self._call: Any = None
        # gRPC writes one message and reads one at a time. Who comes first goes first, so that
        # answers are read in the order in which their steps were asked for.
        self._writing, self._reading = asyncio.Lock(), asyncio.Lock()

    async def __call__(self, request: pb.DecodeRequest) -> pb.StepResponse:
        """One step. A call that has failed, or was given up, is not used again."""
        if self._call is None or self._call.done():
            self._call = self._stub.Decode()
        call = self._call
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


def _open(shard: ShardSocket) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"unix:{shard.address}", options=_CHANNEL_OPTIONS)


def _stub(channel: grpc.aio.Channel) -> pb_grpc.TextGenerationServiceStub:
    return pb_grpc.TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]


async def _all(calls: Iterable[Awaitable[_Response]]) -> list[_Response]:
    """The answers of all ranks in order, or the failure of the first that failed."""
    first, *others = calls
    if not others:
        # Gathering one would make a task of it, and every step would wait for a turn more.
        try:
            return [await first]
        except (asyncio.CancelledError, GenerationError, grpc.aio.AioRpcError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # it is we who are cancelled
            raise _generation_error(error, is_lost=False) from error
    answers = await asyncio.gather(first, *others, return_exceptions=True)
    responses = [answer for answer in answers if not isinstance(answer, BaseException)]
    for answer in answers:
        if isinstance(answer, BaseException):
            raise _generation_error(answer, is_lost=bool(responses)) from answer
    return responses


def _generation_error(error: BaseException, is_lost: bool) -> BaseException:
    """What a failed call means to a client; failures that are no RPC's stay as they are.

    `is_lost`: other ranks have done what this one has not.
    """
    if isinstance(error, asyncio.CancelledError):  # gRPC's word for a channel that was closed
        return LostStepError("Could not connect to Text Generation server: channel closed")
    if not isinstance(error, grpc.aio.AioRpcError):
        return error
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return LostStepError("Could not connect to Text Generation server", _detail(error))
    return (LostStepError if is_lost else GenerationError)("Server error", _detail(error))


def _detail(error: grpc.aio.AioRpcError) -> str:
    """What gRPC or the shard says, which may name sockets and files."""
    return error.details() or error.code().name
