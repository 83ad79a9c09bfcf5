"""The gRPC calls: each message becomes an engine call on the device thread."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from text_generation_process.flags import ShardConfig
from text_generation_proto import pb, pb_grpc

from text_generation_shard.engine.engine import Engine, StepHandle
from text_generation_shard.engine.warmup import warm_up
from text_generation_shard.errors import BatchError, RankError
from text_generation_shard.grammars.grammar import Grammar, GrammarCompiler
from text_generation_shard.messages import Messages, deadline_of_ranks, digest

if TYPE_CHECKING:
    from text_generation_shard.tracing import StepTracing


Fail = Callable[[str, Exception, Any], Awaitable[None]]
"""Ends the call of this name with an error; its context is the last argument."""

# The fields of a StepResponse that every rank answers.
_OF_ALL_RANKS = {"forward_ns", "decode_ns", "total_ns", "concat_ns", "digest"}


class Batch:
    """Owns the router's id of the running batch. Used in the device thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.id: int | None = None
        """None: nothing runs."""

    def prefill(self, request: pb.PrefillRequest, grammars: Mapping[int, Grammar]) -> "Begun":
        """Launch a step with new requests, which become the batch or join it."""
        joins = request.HasField("cached_batch_id")
        if not request.batch.requests:
            raise BatchError("a batch needs at least one request")
        if joins:
            self.check(request.cached_batch_id)
        elif self.id is not None:
            raise BatchError(f"batch {self.id} is running: name it as cached_batch_id")
        handle = self._engine.launch(request.step, request.batch.requests, grammars)
        self.id = request.cached_batch_id if joins else request.batch.id
        return Begun(handle, self.id, joins)

    def decode(self, batch_ids: Sequence[int], step: pb.Step) -> "Begun | None":
        """Launch a step of the batch; None: it ended before this step, which was sent ahead."""
        if not batch_ids:
            raise BatchError("Must provide at least one batch")
        if step.is_ahead and self.id not in batch_ids:
            return None
        for batch_id in batch_ids:
            self.check(batch_id)
        if step.is_ahead:
            self._engine.collect_before(step)
            if not self._engine.num_rows_taken:
                return None
        return Begun(self._engine.launch(step), batch_ids[0])

    def filter(self, batch_id: int, request_ids: list[int]) -> list[int]:
        """Keep these requests only."""
        self.check(batch_id)
        return self._engine.filter(request_ids)

    def clear(self, batch_id: int | None) -> None:
        """Drop this batch, or with None the running one. An unknown id is not an error."""
        if batch_id is None or batch_id == self.id:
            self._engine.clear()
            self.id = None

    def check(self, batch_id: int) -> None:
        """BatchError unless this is the running batch."""
        if batch_id != self.id:
            raise BatchError(f"Batch ID {batch_id} not found in cache.")

    def finish(self, begun: "Begun | None", number: int = 0) -> pb.StepResponse:
        """Wait for a step; the answer to its message, which has this number. Rank 0 answers
        everything; other ranks only times, and a digest that proves the same choices."""
        output = pb.StepResponse()
        if begun is not None:
            try:
                output = begun.handle.result()
            finally:
                if self.id == begun.batch_id and not self._engine.num_rows_taken:
                    self.id = None
            if output.HasField("batch"):
                output.batch.id = begun.batch_id
            if begun.joins:
                output.concat_ns = begun.handle.admit_ns
        if self._engine.world.size > 1:
            output.digest = digest(number, output.generations)
        if self._engine.world.rank:
            for field, _ in output.ListFields():
                if field.name not in _OF_ALL_RANKS:
                    output.ClearField(field.name)
        return output


class Begun(NamedTuple):
    """A launched step of a batch."""

    handle: StepHandle
    batch_id: int
    # New requests joined a running batch.
    joins: bool = False


class ShardService(pb_grpc.TextGenerationServiceServicer):
    """Answers the calls of TextGenerationService.

    Engine calls run in the device thread, in the order that `Messages` keeps. Info, Health and
    ServiceDiscovery answer from the event loop, also while that thread is busy.
    """

    def __init__(
        self,
        engine: Engine,
        device_thread: ThreadPoolExecutor,
        config: ShardConfig,
        on_final: Callable[[RankError], None] = lambda error: None,
        tracing: "StepTracing | None" = None,
        fail: Fail | None = None,
    ) -> None:
        """`device_thread` has one worker, which loaded the engine; `close` shuts it down.
        `on_final`: see `Messages`. fail: for errors of `Decode`; None: they are raised."""
        self._engine, self._batch = engine, Batch(engine)
        self._config, self._tracing, self._fail = config, tracing, fail
        self._device_thread = device_thread
        self._messages = Messages(
            device_thread,
            collectives=engine.world.collectives if engine.world.size > 1 else None,
            deadline_s=config.starting_deadline_s,
            on_gap=partial(self._batch.clear, None),
            on_final=on_final,
        )
        # Rank 0 follows the grammars and broadcasts the tokens it chose.
        self._follows_grammars = engine.world.rank == 0
        # Waits for devices that compute asynchronously.
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="step-waiter")
        model = engine.model.config
        self._grammars = GrammarCompiler(config.model_path, model.vocab_size, model.eos_token_ids)

    def close(self) -> None:
        """Wait for the running step and accept no more."""
        self._messages.close()
        self._grammars.close()
        self._device_thread.shutdown(wait=True, cancel_futures=True)
        self._waiter.shutdown(wait=True, cancel_futures=True)

    def _compute(
        self,
        method: str,
        request: pb.PrefillRequest | pb.DecodeRequest,
        begin: Callable[[], "Begun | None"],
    ) -> "asyncio.Future[pb.StepResponse]":
        """Compute the step of a call in the device thread. A device that runs behind is awaited in
        another thread, so that the device thread can launch the next step."""
        number, step = request.number, request.step
        if self._engine.runs_behind:
            # A launched step is collected even if its call is cancelled.
            answer = asyncio.shield(self._compute_behind(number, begin))
        else:

            def compute() -> pb.StepResponse:
                return self._batch.finish(begin(), number)

            undo = partial(self._engine.align_after_failure, step)
            answer = self._messages.run(number, compute, step.is_ahead, undo)
        if self._tracing is not None and request.trace_context:
            self._tracing.follow(answer, method, request.trace_context)
        return answer

    async def _compute_behind(
        self, number: int, begin: Callable[[], "Begun | None"]
    ) -> pb.StepResponse:
        begun = await self._messages.run(number, begin)
        if begun is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._waiter, begun.handle.wait)
        return await self._messages.run(number, partial(self._batch.finish, begun))

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:
        """The properties of this shard."""
        engine, device, model = self._engine, self._engine.device, self._engine.model
        return pb.InfoResponse(
            dtype=str(device.dtype).removeprefix("torch."),
            device_type=device.name,
            block_size=engine.block_size,
            attention_impl=model.attention.name,
            vocab_size=model.config.vocab_size,
            max_model_len=model.config.max_position,
            version=version("pytgi"),
            rank=self._config.rank,
            world_size=self._config.world_size,
            recompute_at=model.recompute_at,
            prompt_scaled_at=model.prompt_scaled_at,
            spares_core=device.spares_core,
            quantize=self._config.quantize or "",
            deterministic=engine.is_deterministic,
            records_steps=engine.runner.records_steps,
            last_number=self._messages.last_number,
            hidden_size=model.config.hidden_size,
            not_native=model.not_native,
            keeps_state=model.state_bytes > 0,
        )

    async def Health(self, request: pb.HealthRequest, context: Any) -> pb.HealthResponse:
        """OK while the device thread accepts work; `submit` raises once it has ended."""
        self._device_thread.submit(int)
        return pb.HealthResponse()

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: Any
    ) -> pb.ServiceDiscoveryResponse:
        """The sockets of all shards."""
        return pb.ServiceDiscoveryResponse(urls=self._config.urls)

    async def ClearCache(
        self, request: pb.ClearCacheRequest, context: Any
    ) -> pb.ClearCacheResponse:
        """Drop one batch, or all."""
        self._messages.take(request.number, may_skip=True)
        batch_id = request.id if request.HasField("id") else None
        await self._messages.run(request.number, partial(self._batch.clear, batch_id))
        return pb.ClearCacheResponse()

    async def FilterBatch(
        self, request: pb.FilterBatchRequest, context: Any
    ) -> pb.FilterBatchResponse:
        """Keep some requests of a batch."""
        self._messages.take(request.number)
        keep = partial(self._batch.filter, request.batch_id, list(request.request_ids))
        kept = await self._messages.run(request.number, keep)
        return pb.FilterBatchResponse(batch=pb.CachedBatch(id=request.batch_id, request_ids=kept))

    async def Warmup(self, request: pb.WarmupRequest, context: Any) -> pb.WarmupResponse:
        """Allocate the KV cache and time the first steps."""
        self._messages.take(request.number, may_skip=True)
        if self._follows_grammars:
            self._grammars.prepare()

        def measured() -> pb.WarmupResponse:
            self._batch.clear(None)
            result = warm_up(self._engine, request)
            if self._engine.world.size > 1:
                is_cpu = self._engine.device.name == "cpu"
                wanted_s = self._config.step_deadline or deadline_of_ranks(result, request, is_cpu)
                deadline_s = self._engine.world.collectives.wait_at_most(wanted_s)
                result.rank_deadline_ms = math.ceil(deadline_s * 1000)
            return result

        result = await self._messages.run(request.number, measured)
        if self._follows_grammars:
            self._grammars.start()
        return result

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.StepResponse:
        """Compute the prompts of new requests, and advance the batch they join."""
        self._messages.take(request.number)
        try:
            # Usually remembered since CompileGrammar; compiled again if it was forgotten. On other
            # ranks than 0 it is followed elsewhere.
            follows = self._follows_grammars
            grammars = {
                item.id: await self._grammars.compile(item.grammar) if follows else Grammar()
                for item in request.batch.requests
                if item.grammar
            }
        except BaseException as error:
            self._messages.abandon(request.number, error)
            raise
        begin = partial(self._batch.prefill, request, grammars)
        return await self._compute("Prefill", request, begin)

    async def CompileGrammar(
        self, request: pb.CompileGrammarRequest, context: Any
    ) -> pb.CompileGrammarResponse:
        """Compile a grammar before the requests that use it arrive."""
        if not self._follows_grammars:
            return pb.CompileGrammarResponse()
        grammar = await self._grammars.compile(request.grammar)
        return pb.CompileGrammarResponse(
            error=grammar.error,
            min_tokens=grammar.min_tokens,
            retry_after_s=grammar.retry_after_s,
        )

    async def Decode(
        self, requests: AsyncIterator[pb.DecodeRequest], context: Any
    ) -> AsyncIterator[pb.StepResponse]:
        """Advance the running requests, once for each message.

        Messages are queued for the device thread while it computes, so that it starts the next
        step without waiting until an answer is sent.
        """
        steps: asyncio.Queue[asyncio.Future[pb.StepResponse] | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read_steps(requests, steps))
        try:
            while (step := await steps.get()) is not None:
                yield await step
            await reader
        except Exception as error:
            if self._fail is None:
                raise
            await self._fail("Decode", error, context)
        finally:
            reader.cancel()
            while not steps.empty():
                if (step := steps.get_nowait()) is not None:
                    step.add_done_callback(_forget)
                    step.cancel()

    async def _read_steps(
        self,
        requests: AsyncIterator[pb.DecodeRequest],
        steps: "asyncio.Queue[asyncio.Future[pb.StepResponse] | None]",
    ) -> None:
        """Queue a step for each message, then None."""
        try:
            async for request in requests:
                self._messages.take(request.number)
                begin = partial(self._batch.decode, request.batch_ids, request.step)
                steps.put_nowait(self._compute("Decode", request, begin))
        finally:
            steps.put_nowait(None)


def guarded(service: ShardService, fail: Fail) -> Any:
    """The calls of the service, whose exceptions go to `fail`; `Decode` passes its own there."""

    def guard(name: str) -> Callable[..., Any]:
        async def answer(request: Any, context: Any) -> Any:
            try:
                return await getattr(service, name)(request, context)
            except Exception as error:
                await fail(name, error, context)

        return answer

    names = pb.DESCRIPTOR.services_by_name["TextGenerationService"].methods_by_name
    calls = {name: guard(name) for name in names} | {"Decode": service.Decode}
    return SimpleNamespace(**calls)


def _forget(step: "asyncio.Future[pb.StepResponse]") -> None:
    """Retrieve the exception of a step that is no longer awaited, or asyncio would log it."""
    if not step.cancelled():
        step.exception()
