"""The gRPC calls: messages in, engine calls on the device thread, messages out."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

from text_generation_proto import pb, pb_grpc

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine.engine import Engine
from text_generation_shard.engine.ranks import Ranks, digest
from text_generation_shard.engine.step import (
    NewRequest,
    Pooling,
    StepInput,
    StepOutput,
    WarmupLimits,
    WarmupResult,
)
from text_generation_shard.engine.step_handle import StepHandle
from text_generation_shard.errors import BatchError, RankError
from text_generation_shard.grammars.compiler import GrammarCompiler
from text_generation_shard.grammars.constraint import Grammar
from text_generation_shard.grammars.elsewhere import GrammarElsewhere
from text_generation_shard.messages import Messages, NumberedMessages
from text_generation_shard.sampling.params import SamplingParams


class Batch:
    """Owns the number that the router gives to the requests that run. Used in the device thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # None: nothing runs.
        self.id: int | None = None

    def prefill(self, batch_id: int, cached_id: int | None, step: StepInput) -> "Begun":
        """Begin to compute new requests, which become the batch or join it."""
        if not step.new_requests:
            raise BatchError("a batch needs at least one request")
        if cached_id is not None:
            self.check(cached_id)
        elif self.id is not None:
            raise BatchError(f"batch {self.id} is running: name it as cached_batch_id")
        elif step.runs_on:
            raise BatchError("there is no cached batch that could advance")
        handle = self._engine.launch(step)
        self.id = batch_id if cached_id is None else cached_id
        return Begun(handle, self.id, joins=cached_id is not None)

    def decode(self, batch_ids: list[int], step: StepInput) -> "Begun | None":
        """Let the batch advance; None: it has ended, which a step ahead could not know."""
        if not batch_ids:
            raise BatchError("Must provide at least one batch")
        if step.is_ahead and self.id not in batch_ids:
            return None
        for batch_id in batch_ids:
            self.check(batch_id)
        self._engine.make_way(step)
        if step.is_ahead and not self._engine.num_rows_taken:
            return None
        return Begun(self._engine.launch(step), batch_ids[0])

    def filter(self, batch_id: int, request_ids: list[int]) -> list[int]:
        """Keep these requests only."""
        self.check(batch_id)
        return self._engine.filter(request_ids)

    def clear(self, batch_id: int | None) -> None:
        """Forget the batch; another number is fine. None: whichever there is."""
        if batch_id is None or batch_id == self.id:
            self._engine.clear()
            self.id = None

    def check(self, batch_id: int) -> None:
        """BatchError if another is asked for."""
        if batch_id != self.id:
            raise BatchError(f"Batch ID {batch_id} not found in cache.")

    def finish(self, begun: "Begun | None", number: int = 0) -> pb.StepResponse:
        """What became of a step, which the message of this number has asked for; waits for it."""
        if begun is None:
            return self._answer(StepOutput([], []), number)
        try:
            output = begun.handle.result()
        finally:
            if self.id == begun.batch_id and not self._engine.num_rows_taken:
                self.id = None
        response = self._answer(output, number)
        if output.running_ids and not self._engine.world.rank:
            response.batch.CopyFrom(
                pb.CachedBatch(id=begun.batch_id, request_ids=output.running_ids)
            )
        if begun.joins:
            response.concat_ns = output.admit_ns
        return response

    def _answer(self, output: StepOutput, number: int) -> pb.StepResponse:
        """Of several ranks the first answers everything, the others prove that they have chosen the
        same."""
        world = self._engine.world
        response = pb.StepResponse() if world.rank else _to_response(output)
        response.forward_ns = output.forward_ns
        response.decode_ns = output.decode_ns
        response.total_ns = output.total_ns
        if world.size > 1:
            response.digest = digest(number, output)
        return response


class Begun(NamedTuple):
    """A step that was launched for a batch."""

    handle: StepHandle
    batch_id: int
    # Requests joined a batch that was there.
    joins: bool = False


class ShardService(pb_grpc.TextGenerationServiceServicer):
    """Answers the calls of TextGenerationService.

    Whatever touches the engine runs in one thread, in the order that `Messages` keeps; Info, Health
    and ServiceDiscovery answer from the event loop while that thread is busy.
    """

    def __init__(
        self,
        engine: Engine,
        device_thread: ThreadPoolExecutor,
        config: ShardConfig,
        on_final: Callable[[RankError], None] | None = None,
    ) -> None:
        """`device_thread` has one worker, which has loaded the engine; `close` shuts it down.
        `on_final`, needed with several ranks: see `Messages`."""
        self._engine, self._batch = engine, Batch(engine)
        self._config = config
        self._device_thread = device_thread
        self._messages = Messages(device_thread)
        if engine.world.size > 1:
            assert on_final is not None, "somebody ends a rank that can not go on"
            self._messages = NumberedMessages(
                *(device_thread, Ranks(engine.world), config.step_deadline),
                *(partial(self._batch.clear, None), on_final),
            )
        # The others are told what rank 0 has chosen by its grammars.
        self._follows_grammars = engine.world.rank == 0
        # Waits where a device computes while this process does other things.
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="step-waiter")
        model = engine.model.config
        self._grammars = GrammarCompiler(config.model_path, model.vocab_size, model.eos_token_ids)

    def close(self) -> None:
        """Let the running step end and take no more."""
        self._messages.close()
        self._grammars.close()
        self._device_thread.shutdown(wait=True, cancel_futures=True)
        self._waiter.shutdown(wait=True, cancel_futures=True)

    def _compute(
        self, number: int, begin: Callable[[], "Begun | None"], step: StepInput
    ) -> "asyncio.Future[pb.StepResponse]":
        """Begin with a step in the device thread, which computes it there and then; a device that
        runs behind is not waited for there, and the thread is free for the next step."""
        if self._engine.runs_behind:
            # A step that was launched is collected, though its call may have ended.
            return asyncio.shield(self._compute_behind(number, begin))

        def compute() -> pb.StepResponse:
            return self._batch.finish(begin(), number)

        undo = partial(self._engine.even_out, step)
        return self._messages.run(number, compute, step.is_ahead, undo)

    async def _compute_behind(
        self, number: int, begin: Callable[[], "Begun | None"]
    ) -> pb.StepResponse:
        begun = await self._messages.run(number, begin)
        if begun is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._waiter, begun.handle.wait)
        return await self._messages.run(number, partial(self._batch.finish, begun))

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:
        """What this shard is."""
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
            prompt_scaled_at=model.rotary.prompt_scaled_at,
            spares_core=device.spares_core,
            quantize=self._config.quantize or "",
            deterministic=engine.is_deterministic,
            records_steps=engine.records_steps,
            last_number=self._messages.last_number,
            hidden_size=model.config.hidden_size,
        )

    async def Health(self, request: pb.HealthRequest, context: Any) -> pb.HealthResponse:
        """Answers as long as this process does; a dead device thread can not take work."""
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
        """Forget one batch, or all."""
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
        """Allocate the cache and run a first pass."""
        self._messages.take(request.number, may_skip=True)
        limits = WarmupLimits(
            max_prefill_tokens=request.max_prefill_tokens,
            max_batch_size=request.max_batch_size,
            max_input_tokens=_given(request, "max_input_tokens"),
            max_total_tokens=_given(request, "max_total_tokens"),
            max_batch_total_tokens=_given(request, "max_batch_total_tokens"),
        )
        if self._follows_grammars:
            self._grammars.prepare()

        def warm_up() -> WarmupResult:
            self._batch.clear(None)
            return self._engine.warmup(limits)

        result = await self._messages.run(request.number, warm_up)
        if self._follows_grammars:
            self._grammars.start()
        return pb.WarmupResponse(
            num_blocks=result.num_blocks,
            max_input_tokens=result.max_input_tokens,
            max_total_tokens=result.max_total_tokens,
            kv_cache_bytes=result.kv_cache_bytes,
            weights_bytes=result.weights_bytes,
            decode_step_ns=result.decode_step_ns,
            prefill_token_ns=result.prefill_token_ns,
            prefill_context_ns=result.prefill_context_ns,
        )

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.StepResponse:
        """Take requests in, compute their prompts, and advance the batch they join."""
        number = request.number
        cached = request.cached_batch_id if request.HasField("cached_batch_id") else None
        self._messages.take(number)
        try:
            requests = [await self._to_new_request(item) for item in request.batch.requests]
            step = _to_step(request.advance, request.HasField("advance"), requests)
        except BaseException as error:
            self._messages.give_up(number, error)
            raise
        begin = partial(self._batch.prefill, request.batch.id, cached, step)
        return await self._compute(number, begin, step)

    async def CompileGrammar(
        self, request: pb.CompileGrammarRequest, context: Any
    ) -> pb.CompileGrammarResponse:
        """Compile a grammar that requests will carry."""
        if not self._follows_grammars:
            return pb.CompileGrammarResponse()
        grammar = await self._grammars.compile(request.grammar)
        return pb.CompileGrammarResponse(
            error=grammar.error,
            min_tokens=grammar.min_tokens,
            retry_after_s=grammar.retry_after_s,
        )

    async def _to_new_request(self, message: pb.Request) -> NewRequest:
        grammar: Grammar | None = None
        if message.grammar and self._follows_grammars:
            # Compiled and remembered since CompileGrammar, unless many others came between; then it
            # is tried again.
            grammar = await self._grammars.compile(message.grammar)
        elif message.grammar:
            grammar = GrammarElsewhere()
        return _to_new_request(message, grammar)

    async def Decode(
        self, requests: AsyncIterator[pb.DecodeRequest], context: Any
    ) -> AsyncIterator[pb.StepResponse]:
        """Advance the running requests, once for each message.

        Messages are read and handed to the device thread while it computes, so that it goes from
        one step to the next without waiting for an answer to be sent.
        """
        steps: asyncio.Queue[asyncio.Future[pb.StepResponse] | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read_steps(requests, steps))
        try:
            while (step := await steps.get()) is not None:
                yield await step
            await reader
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
        """Queues a step for each message, and None behind the last."""
        try:
            async for request in requests:
                number = request.number
                self._messages.take(number)
                try:
                    step = _to_step(request.advance, True)
                except ValueError as error:
                    self._messages.give_up(number, error)
                    raise
                begin = partial(self._batch.decode, list(request.batch_ids), step)
                steps.put_nowait(self._compute(number, begin, step))
        finally:
            steps.put_nowait(None)


def _forget(step: "asyncio.Future[pb.StepResponse]") -> None:
    """Takes note of how a step ended behind one that failed: nobody asks for it any more."""
    if not step.cancelled():
        step.exception()


def _given(request: pb.WarmupRequest, name: Any) -> int | None:
    return int(getattr(request, name)) if request.HasField(name) else None


def _to_step(
    message: pb.Advance, runs_on: bool, new_requests: Sequence[NewRequest] = ()
) -> StepInput:
    return StepInput(
        new_requests=new_requests,
        runs_on=runs_on,
        grown=list(zip(message.grown_request_ids, message.grown_block_ids, strict=True)),
        chunks=list(zip(message.chunk_request_ids, message.chunk_lens, strict=True)),
        speculate=message.speculate,
        is_ahead=message.is_ahead,
    )


def _to_new_request(message: pb.Request, grammar: Grammar | None) -> NewRequest:
    chooser, stopping = message.parameters, message.stopping_parameters
    bias = zip(chooser.logit_bias_ids, chooser.logit_bias_values, strict=True)
    return NewRequest(
        id=message.id,
        input_ids=list(message.input_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        block_table=list(message.block_table),
        sampling=SamplingParams(
            temperature=chooser.temperature,
            top_k=chooser.top_k,
            top_p=chooser.top_p,
            typical_p=chooser.typical_p,
            min_p=chooser.min_p,
            do_sample=chooser.do_sample,
            seed=chooser.seed,
            repetition_penalty=chooser.repetition_penalty,
            frequency_penalty=chooser.frequency_penalty,
            presence_penalty=chooser.presence_penalty,
            watermark=chooser.watermark,
            logit_bias=tuple(bias),
        ),
        max_new_tokens=stopping.max_new_tokens,
        min_new_tokens=stopping.min_new_tokens,
        ignore_eos_token=stopping.ignore_eos_token,
        stop_token_ids=list(stopping.stop_token_ids),
        prefill_logprobs=message.prefill_logprobs,
        top_n_tokens=message.top_n_tokens,
        grammar=grammar,
        chunk_len=message.chunk_len,
        pooling=Pooling(message.pooling),
        score_token_ids=list(message.score_token_ids),
    )


def _to_response(result: StepOutput) -> pb.StepResponse:
    return pb.StepResponse(
        generations=pb.Generations(
            request_ids=result.request_ids,
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            finish_reasons=result.finish_reasons,  # type: ignore[arg-type]
            top_token_counts=result.top_token_counts,
            top_token_ids=result.top_token_ids,
            top_token_logprobs=result.top_token_logprobs,
            token_counts=result.token_counts,
        ),
        prefill_logprobs=[
            pb.PrefillLogprobs(request_id=request_id, logprobs=values, ranks=ranks)
            for (request_id, values), ranks in zip(
                result.prefill_logprobs, result.prefill_ranks, strict=True
            )
        ],
        prefill_top_tokens=[
            pb.PrefillTopTokens(request_id=request_id, token_ids=ids, logprobs=values)
            for request_id, ids, values in result.prefill_top_tokens
        ],
        pooled_prompts=[
            pb.PooledPrompt(request_id=request_id, values=values)
            for request_id, values in result.pooled_prompts
        ],
        token_scores=[
            pb.TokenScores(request_id=request_id, logprobs=values)
            for request_id, values in result.token_scores
        ],
        errors=[
            pb.RequestError(request_id=request_id, message=message)
            for request_id, message in result.errors
        ],
    )
