"""The shards over gRPC: every call goes to all ranks, rank 0's tokens count."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, TypeVar

import grpc
from text_generation_proto import pb, pb_grpc

from text_generation_router.client import answers, translate
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
# Once a rank has failed, the others fail at once, too, or have computed all the same; who has not
# said so within this is not waited for: it hangs.
OTHERS_S = 0.5


class ShardedClient:
    """Owns one channel per rank and the numbers of messages; implements `scheduler.shards.Shards`.

    What all ranks must take in one order is numbered, one more each time, in the order in which it
    is sent. A call returns when all ranks have answered, so that no rank is still busy with a
    failed step when the next one begins; but for one that is dead, or hangs when another has
    answered or failed, nobody waits. Failures are GenerationError in TGI's words.
    """

    def __init__(
        self,
        channels: list[grpc.aio.Channel],
        sockets: list[ShardSocket],
        last_number: int = 0,
        answer_s: float = 20.0,
    ) -> None:
        """No rank has taken a message of a number above `last_number`. answer_s: how long a rank is
        waited for that has not answered what another one has."""
        self._answer_s = answer_s
        self._channels = channels
        self._sockets = sockets
        self._last_number = last_number
        self._stubs = [_stub(channel) for channel in channels]
        self._decodes = [DecodeCall(stub) for stub in self._stubs]

    @classmethod
    async def connect(
        cls, master_uds_path: str, timeout_s: float = 60.0, answer_s: float = 20.0
    ) -> "ShardedClient":
        """Asks the shard that listens on `master_uds_path` for the others and connects to all. Each
        answers within `answer_s` once it listens, and the others listen so soon after that one.

        The first numbered call must be `clear_cache` or `warmup`: the last router may have ended
        before all ranks had taken its last messages, and only there numbers may be missing. Raises
        GenerationError, with a sentence for the user, if they are not there in time, or are another
        user's.
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
        """Closes the channels; calls under way fail. May be repeated."""
        await asyncio.gather(*(channel.close(None) for channel in self._channels))
        while self._sockets:
            self._sockets.pop().close()

    async def info(self) -> ShardInfo:
        """What the shards say about themselves; GenerationError if they contradict each other."""
        responses = await self._all_soon(stub.Info(pb.InfoRequest()) for stub in self._stubs)
        return answers.merge_infos([translate.from_info(response) for response in responses])

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
            number=self._next_number(),
        )
        responses = await self._all_soon(stub.Warmup(request) for stub in self._stubs)
        return translate.from_warmup(responses)

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
        request.number = self._next_number()
        responses = await self._all_soon(stub.Prefill(request) for stub in self._stubs)
        return answers.merge_steps(request.number, responses)

    async def decode(self, batch_ids: Sequence[int], advance: Advance) -> StepResult:
        """See `Shards.decode`."""
        request = translate.to_decode(batch_ids, advance)
        request.number = self._next_number()
        responses = await self._all_soon(decode(request) for decode in self._decodes)
        return answers.merge_steps(request.number, responses)

    def _all_soon(self, calls: Iterable[Awaitable[_Response]]) -> Awaitable[list[_Response]]:
        return _all(calls, self._answer_s)

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
        return answers.merge_kept(request.number, responses)

    async def clear_cache(self, batch_id: int | None) -> None:
        """See `Shards.clear_cache`."""
        request = pb.ClearCacheRequest(id=batch_id, number=self._next_number())
        await self._all_soon(stub.ClearCache(request) for stub in self._stubs)

    def _next_number(self) -> int:
        """For a message that is sent before another one asks for its number."""
        self._last_number += 1
        return self._last_number


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
        """One step. A call that has failed, or was given up, is not used again: nobody knows
        whether the shard has taken the steps behind the one that failed, so that what is sent next
        must be a `clear_cache`, for which a number may be missing."""
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
    """Connects to one more shard, as soon as it listens; the number of its last message, and where
    it says that all shards are."""
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
            "stopped; start all shards anew"
        ) from error
    return info.last_number, found.urls


def _no_answer(path: str, master_uds_path: str, timeout_s: float) -> str:
    if path == master_uds_path:
        return (
            f"no answer from the shards at {path} within {timeout_s:g} s; "
            "start text-generation-server first, or give its --master-shard-uds-path"
        )
    return (
        f"no answer from the shard at {path} within {timeout_s:g} s, though that at "
        f"{master_uds_path} is there; its log says what became of it, and all shards must be "
        "started anew"
    )


async def _all(
    calls: Iterable[Awaitable[_Response]], answer_s: float | None = None
) -> list[_Response]:
    """The answers of all ranks in order, or the failure of one of them. answer_s: see
    ShardedClient; None: without limit."""
    first, *others = calls
    if not others:
        # Gathering one would make a task of it, and every step would wait for a turn more.
        try:
            return [await first]
        except (asyncio.CancelledError, GenerationError, grpc.aio.AioRpcError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # it is we who are cancelled
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
    """An answer or an exception; None: it is still waited for."""
    if not task.done():
        return None
    return asyncio.CancelledError() if task.cancelled() else task.exception() or task.result()
