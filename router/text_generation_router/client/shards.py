"""The shards over gRPC: every call goes to all ranks, rank 0's tokens count."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from text_generation_process.defaults import STARTING_DEADLINE_S
from text_generation_process.sampling import FinishReason, Pooling
from text_generation_proto import pb, pb_grpc

from text_generation_router.client.ranks import (
    ShardInfo,
    WarmupResult,
    check_socket,
    failure,
    from_compiled,
    from_filtered,
    from_info,
    from_warmup,
    generation_error,
    is_gone,
    merge_infos,
    name_of,
    no_answer,
    nothing,
    outcome_of,
    path_of,
)
from text_generation_router.errors import GenerationError
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.step import (
    CachedBatch,
    GrammarResult,
    LostStepError,
    Plan,
    StepResult,
)

_Answer = TypeVar("_Answer")
_Merge = Callable[[list[Any]], _Answer]

# By name; the wire's others are no endings.
_FINISH_REASONS = {
    number: FinishReason.__members__.get(name.removeprefix("FINISH_REASON_"))
    for name, number in pb.FinishReason.items()
}
_POOLINGS: dict[Pooling | None, pb.Pooling] = {None: pb.POOLING_NONE}
_POOLINGS |= {own: getattr(pb, f"POOLING_{own.name}") for own in Pooling}

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A unix socket is on this machine: never through http_proxy.
    ("grpc.enable_http_proxy", 0),
    # The descriptor in an address is reused by another socket once this one is closed.
    ("grpc.use_local_subchannel_pool", 1),
]
_POLL_S = 0.02  # a start takes seconds, so that this delays it by nothing
_HEALTH_TIMEOUT_S = 4.5  # a healthy shard answers in milliseconds, also during a step
_READY = grpc.ChannelConnectivity.READY
# Once a rank has failed, the other ranks fail at once or complete. A rank without an answer
# within this hangs.
OTHERS_S = 0.5


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
            raise GenerationError(no_answer(path, master_uds_path, timeout_s)) from error
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
        result = await self._call("Warmup", request, from_warmup, self.answer_s)
        # Ranks wait this long for one another from now on.
        self.answer_s = result.rank_deadline_s or self.answer_s
        return result

    def health(self) -> Coroutine[Any, Any, None]:
        """Returns if every shard is healthy."""
        request = pb.HealthRequest()
        return self._call("Health", request, nothing, None, timeout=_HEALTH_TIMEOUT_S)

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
            prefill = to_prefill(plan, batch_id, cached_batch_id, trace_context, number)
            return self._call("Prefill", prefill, merge, self.answer_s)
        decode = to_decode(plan, batch_id, trace_context, number)
        return _merged([rank.decode(decode) for rank in self._ranks], merge, self.answer_s)

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        """Compiles a grammar in llguidance's form, while steps run. Raises TimeoutError."""
        request = pb.CompileGrammarRequest(grammar=grammar)
        async with asyncio.timeout(timeout_s):
            return await self._call("CompileGrammar", request, from_compiled, None)

    def filter_batch(
        self, batch_id: int, request_ids: Sequence[int]
    ) -> Coroutine[Any, Any, CachedBatch]:
        """Keeps the rows of `request_ids` (not empty) and frees the others."""
        request = pb.FilterBatchRequest(
            batch_id=batch_id, request_ids=request_ids, number=self._next_number()
        )
        return self._call("FilterBatch", request, from_filtered, self.answer_s)

    def clear_cache(self, batch_id: int | None) -> Coroutine[Any, Any, None]:
        """Frees the rows of one batch, or of all; an unknown id is no error."""
        request = pb.ClearCacheRequest(id=batch_id, number=self._next_number())
        return self._call("ClearCache", request, nothing, self.answer_s)

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
            check_socket(path, self._descriptor, self.address)
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
        raise generation_error(error, is_lost=False) from error


async def _several(
    tasks: Sequence[asyncio.Future[Any]], merge: _Merge[_Answer], answer_s: float | None
) -> _Answer:
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done, waiting = await asyncio.wait(
            tasks, timeout=answer_s, return_when=asyncio.FIRST_EXCEPTION
        )
        failed = [one for one in map(outcome_of, done) if isinstance(one, BaseException)]
        if waiting and failed and not any(map(is_gone, failed)):
            await asyncio.wait(waiting, timeout=OTHERS_S)
    finally:
        outcomes = [outcome_of(task) for task in tasks]
        for task in tasks:
            task.cancel()
    if (error := failure(outcomes)) is not None:
        raise error
    return merge(outcomes)


def merge_steps(number: int, responses: Sequence[pb.StepResponse]) -> StepResult:
    """The tokens that rank 0 has sampled, and the times of all ranks, if there are several.

    Raises LostStepError, which names rank and message, if a rank has sampled other tokens.
    """
    first, *others = responses
    if not others:
        return from_step(first)
    if wrong := [rank for rank, one in enumerate(responses) if one.digest != first.digest]:
        raise LostStepError(
            f"Server error: {name_of(wrong)} chose other tokens than shard 0 in step {number}, so "
            "that it is not known which are right"
        )
    shard_ns = [response.forward_ns + response.decode_ns for response in responses]
    return from_step(first, shard_ns)


# ---- Messages ----


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
    generations, rows = response.generations, response.batch
    return StepResult(
        request_ids=tuple(generations.request_ids),
        token_ids=tuple(generations.token_ids),
        token_counts=tuple(generations.token_counts),
        logprobs=tuple(generations.logprobs),
        finish_reasons=tuple(map(_FINISH_REASONS.__getitem__, generations.finish_reasons)),
        batch=CachedBatch(rows.id, tuple(rows.request_ids)) if rows.request_ids else None,
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
