"""The shards over gRPC: every call goes to all ranks, rank 0's tokens count."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from text_generation_process.defaults import STARTING_DEADLINE_S
from text_generation_proto import pb, pb_grpc

from text_generation_router.client import answers, translate
from text_generation_router.client.shard_socket import ShardSocket, path_of
from text_generation_router.client.translate import ShardInfo, WarmupResult
from text_generation_router.errors import GenerationError
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.shards import (
    Advance,
    CachedBatch,
    GoneShardError,
    GrammarResult,
    LostStepError,
    StepResult,
)

__all__ = ["ShardInfo", "ShardedClient", "WarmupResult"]

_Response = TypeVar("_Response")

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A unix socket is on this machine: never through http_proxy.
    ("grpc.enable_http_proxy", 0),
    # The descriptor in an address is reused by another socket once this one is closed.
    ("grpc.use_local_subchannel_pool", 1),
]
_HEALTH_TIMEOUT_S = 5.0  # a healthy shard answers in milliseconds, also during a step
# How often the channels are checked.
_GONE_POLL_S = 0.25
_READY = grpc.ChannelConnectivity.READY
# Once a rank has failed, the other ranks fail at once or complete. A rank without an answer
# within this hangs.
OTHERS_S = 0.5


class ShardedClient:
    """Owns one channel per rank and the numbers of messages; implements `scheduler.shards.Shards`.

    Messages that all ranks must take in the same order are numbered, in the order in which they
    are sent. A call returns when all ranks have answered, so that no rank still computes a failed
    step when the next one begins. It does not wait for a rank that has ended, or that is silent
    when another one has answered or failed. Failures are GenerationError in TGI's words.
    """

    def __init__(
        self,
        channels: list[grpc.aio.Channel],
        sockets: list[ShardSocket],
        last_number: int = 0,
        answer_s: float = STARTING_DEADLINE_S,
    ) -> None:
        """No rank has taken a message with a number above `last_number`. answer_s: how long the
        call waits for a rank when another one has answered."""
        self.answer_s = answer_s
        """The same, for later calls."""
        self._channels = channels
        self._sockets = sockets
        self._last_number = last_number
        self._stubs = [_stub(channel) for channel in channels]
        self._decodes = [DecodeCall(stub) for stub in self._stubs]

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
        channels, sockets = list[grpc.aio.Channel](), list[ShardSocket]()
        path = master_uds_path
        try:
            async with asyncio.timeout(timeout_s):
                last_number, urls = await _reach(path, channels, sockets, answer_s)
                for path in map(path_of, urls[1:]):
                    number, _ = await _reach(path, channels, sockets, answer_s)
                    last_number = max(last_number, number)
        except BaseException as error:
            await cls(channels, sockets).close()
            if not isinstance(error, (TimeoutError, grpc.aio.AioRpcError)):
                raise
            raise GenerationError(_no_answer(path, master_uds_path, timeout_s)) from error
        return cls(channels, sockets, last_number, answer_s)

    async def close(self) -> None:
        """Closes the channels; calls in flight fail. May be repeated."""
        await asyncio.gather(*(channel.close(None) for channel in self._channels))
        while self._sockets:
            self._sockets.pop().close()

    async def gone(self) -> None:
        """Returns when a shard has ended, also while no call is in flight."""
        while True:
            await asyncio.sleep(_GONE_POLL_S)
            # A channel whose shard has ended is idle until the next call; so is one that was not
            # used for half an hour, which that call connects again.
            if all(channel.get_state() is _READY for channel in self._channels):
                continue
            with suppress(GenerationError):
                try:
                    await self.health()
                except GoneShardError:
                    return

    async def info(self) -> ShardInfo:
        """Properties of the shards. Raises GenerationError if they differ."""
        responses = await self._all_soon(stub.Info(pb.InfoRequest()) for stub in self._stubs)
        return answers.merge_infos([translate.from_info(response) for response in responses])

    async def warmup(
        self,
        max_prefill_tokens: int,
        max_batch_size: int,
        max_input_tokens: int | None = None,
        max_total_tokens: int | None = None,
        max_batch_total_tokens: int | None = None,
        num_snapshots: int | None = None,
    ) -> WarmupResult:
        """Allocates the KV cache; None leaves a limit to the shards. All in tokens or rows."""
        request = pb.WarmupRequest(
            max_prefill_tokens=max_prefill_tokens,
            max_batch_size=max_batch_size,
            max_input_tokens=max_input_tokens,
            max_total_tokens=max_total_tokens,
            max_batch_total_tokens=max_batch_total_tokens,
            num_snapshots=num_snapshots,
            number=self._next_number(),
        )
        responses = await self._all_soon(stub.Warmup(request) for stub in self._stubs)
        result = translate.from_warmup(responses)
        # Ranks wait this long for one another from now on.
        self.answer_s = result.rank_deadline_s or self.answer_s
        return result

    async def health(self) -> None:
        """Returns if every shard is healthy."""
        request = pb.HealthRequest()
        await _all(stub.Health(request, timeout=_HEALTH_TIMEOUT_S) for stub in self._stubs)

    async def prefill(
        self,
        batch_id: int,
        entries: Sequence[Entry],
        cached_batch_id: int | None,
        advance: Advance | None = None,
        trace_context: str = "",
    ) -> StepResult:
        """See `Shards.prefill`."""
        request = translate.to_prefill(batch_id, entries, cached_batch_id, advance, trace_context)
        request.number = self._next_number()
        responses = await self._all_soon(stub.Prefill(request) for stub in self._stubs)
        return answers.merge_steps(request.number, responses)

    async def decode(
        self, batch_ids: Sequence[int], advance: Advance, trace_context: str = ""
    ) -> StepResult:
        """See `Shards.decode`."""
        request = translate.to_decode(batch_ids, advance, trace_context)
        request.number = self._next_number()
        responses = await self._all_soon(decode(request) for decode in self._decodes)
        return answers.merge_steps(request.number, responses)

    def _all_soon(self, calls: Iterable[Awaitable[_Response]]) -> Awaitable[list[_Response]]:
        return _all(calls, self.answer_s)

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        """See `Shards.compile_grammar`."""
        request = pb.CompileGrammarRequest(grammar=grammar)
        async with asyncio.timeout(timeout_s):
            responses = await _all(stub.CompileGrammar(request) for stub in self._stubs)
        return translate.from_compiled(responses)

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        """See `Shards.filter_batch`."""
        request = pb.FilterBatchRequest(
            batch_id=batch_id, request_ids=request_ids, number=self._next_number()
        )
        responses = await self._all_soon(stub.FilterBatch(request) for stub in self._stubs)
        return translate.from_cached_batch(responses[0].batch)

    async def clear_cache(self, batch_id: int | None) -> None:
        """See `Shards.clear_cache`."""
        request = pb.ClearCacheRequest(id=batch_id, number=self._next_number())
        await self._all_soon(stub.ClearCache(request) for stub in self._stubs)

    def _next_number(self) -> int:
        """For a message that is sent before the next number is taken."""
        self._last_number += 1
        return self._last_number


class DecodeCall:
    """Owns the streaming call to one rank for decode steps, opened when one is needed.

    A message over an open call takes half the time of a call of its own. Several may be in flight.
    """

    def __init__(self, stub: pb_grpc.TextGenerationServiceStub) -> None:
        self._stub = stub
        self._call: Any = None
        # gRPC writes one message and reads one at a time. The locks are fair, so that answers are
        # read in the order of their steps.
        self._writing, self._reading = asyncio.Lock(), asyncio.Lock()

    async def __call__(self, request: pb.DecodeRequest) -> pb.StepResponse:
        """One step. A call that has failed or was cancelled is not used again: it is not known
        whether the shard has taken the steps behind the failed one. Therefore the next message must
        be a `clear_cache`, which may skip numbers."""
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


async def _reach(
    path: str,
    channels: list[grpc.aio.Channel],
    sockets: list[ShardSocket],
    answer_s: float,
) -> tuple[int, Sequence[str]]:
    """Connects to one more shard when it listens. Returns the number of its last message, and the
    addresses of all shards."""
    is_first = not sockets
    if is_first:
        sockets.append(await ShardSocket.wait_for(path))
    try:
        async with asyncio.timeout(answer_s):
            if not is_first:
                sockets.append(await ShardSocket.wait_for(path))
            channels.append(_open(sockets[-1]))
            await channels[-1].channel_ready()
            stub = _stub(channels[-1])
            info: pb.InfoResponse = await stub.Info(pb.InfoRequest())
            found = await stub.ServiceDiscovery(pb.ServiceDiscoveryRequest())
    except TimeoutError as error:
        raise GenerationError(
            f"the shard at {path} listens and has not answered for {answer_s:g} s: it hangs or was "
            "stopped; restart all shards"
        ) from error
    return info.last_number, found.urls


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


async def _all(
    calls: Iterable[Awaitable[_Response]], answer_s: float | None = None
) -> list[_Response]:
    """The answers of all ranks in order; raises the failure of one. answer_s: see ShardedClient;
    None: no limit."""
    first, *others = calls
    if not others:
        # A task for a single call would cost every step one more turn of the event loop.
        try:
            return [await first]
        except (asyncio.CancelledError, GenerationError, grpc.aio.AioRpcError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # this task is cancelled
            raise answers.generation_error(error, is_lost=False) from error
    tasks = [asyncio.ensure_future(call) for call in (first, *others)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done, waiting = await asyncio.wait(
            tasks, timeout=answer_s, return_when=asyncio.FIRST_EXCEPTION
        )
        failed = [one for one in map(_outcome, done) if isinstance(one, BaseException)]
        if waiting and failed and not any(map(answers.is_gone, failed)):
            await asyncio.wait(waiting, timeout=OTHERS_S)
    finally:
        outcomes = [_outcome(task) for task in tasks]
        for task in tasks:
            task.cancel()
    if (failure := answers.failure(outcomes)) is not None:
        raise failure
    return [task.result() for task in tasks]


def _outcome(task: asyncio.Future[Any]) -> Any:
    """An answer or an exception; None: neither yet."""
    if not task.done():
        return None
    return asyncio.CancelledError() if task.cancelled() else task.exception() or task.result()
