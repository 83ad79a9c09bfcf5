"""The gRPC calls: messages in, engine calls on the device thread, messages out."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, TypeVar

from text_generation_proto import pb, pb_grpc

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine.batch import RowRequest
from text_generation_shard.engine.engine import Engine
from text_generation_shard.engine.step import Advance, StepResult, WarmupLimits
from text_generation_shard.grammars.compiler import GrammarCompiler
from text_generation_shard.grammars.constraint import Grammar
from text_generation_shard.sampling.params import SamplingParams

_T = TypeVar("_T")


class ShardService(pb_grpc.TextGenerationServiceServicer):
    """Answers the calls of TextGenerationService.

    Whatever touches the engine runs in one thread, in order of arrival; Info, Health and
    ServiceDiscovery answer from the event loop while that thread is busy.
    """

    def __init__(
        self, engine: Engine, device_thread: ThreadPoolExecutor, config: ShardConfig
    ) -> None:
        """`device_thread` has one worker, which has loaded the engine; `close` shuts it down."""
        self._engine = engine
        self._config = config
        self._device_thread = device_thread
        model = engine.model_config
        self._grammars = GrammarCompiler(config.model_path, model.vocab_size, model.eos_token_ids)

    async def _on_device(self, call: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._device_thread, call, *args)

    def close(self) -> None:
        """Let the running step end and take no more."""
        self._grammars.close()
        self._device_thread.shutdown(wait=True, cancel_futures=True)

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:
        """What this shard is."""
        engine = self._engine
        return pb.InfoResponse(
            dtype=str(engine.dtype).removeprefix("torch."),
            device_type=engine.device.type,
            block_size=engine.block_size,
            attention_impl=engine.attention_name,
            vocab_size=engine.model_config.vocab_size,
            max_model_len=engine.model_config.max_position,
            version=version("pytgi"),
            rank=self._config.rank,
            world_size=self._config.world_size,
            recompute_at=engine.recompute_at,
            prompt_scaled_at=engine.prompt_scaled_at,
            spares_core=engine.spares_core,
            quantize=self._config.quantize or "",
            deterministic=engine.is_deterministic,
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
        await self._on_device(self._engine.clear, request.id if request.HasField("id") else None)
        return pb.ClearCacheResponse()

    async def FilterBatch(
        self, request: pb.FilterBatchRequest, context: Any
    ) -> pb.FilterBatchResponse:
        """Keep some requests of a batch."""
        kept = await self._on_device(
            self._engine.filter, request.batch_id, list(request.request_ids)
        )
        return pb.FilterBatchResponse(batch=pb.CachedBatch(id=request.batch_id, request_ids=kept))

    async def Warmup(self, request: pb.WarmupRequest, context: Any) -> pb.WarmupResponse:
        """Allocate the cache and run a first pass."""
        self._grammars.prepare()
        limits = WarmupLimits(
            max_prefill_tokens=request.max_prefill_tokens,
            max_batch_size=request.max_batch_size,
            max_input_tokens=_given(request, "max_input_tokens"),
            max_total_tokens=_given(request, "max_total_tokens"),
            max_batch_total_tokens=_given(request, "max_batch_total_tokens"),
        )
        result = await self._on_device(self._engine.warmup, limits)
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
        cached = request.cached_batch_id if request.HasField("cached_batch_id") else None
        advance = _to_advance(request.advance) if request.HasField("advance") else None
        requests = [await self._to_row_request(item) for item in request.batch.requests]
        return _to_response(
            await self._on_device(self._engine.prefill, request.batch.id, requests, cached, advance)
        )

    async def CompileGrammar(
        self, request: pb.CompileGrammarRequest, context: Any
    ) -> pb.CompileGrammarResponse:
        """Compile a grammar that requests will carry."""
        grammar = await self._grammars.compile(request.grammar)
        return pb.CompileGrammarResponse(
            error=grammar.error,
            min_tokens=grammar.min_tokens,
            retry_after_s=grammar.retry_after_s,
        )

    async def _to_row_request(self, message: pb.Request) -> RowRequest:
        # Compiled and remembered since CompileGrammar, unless many others came between; then it is
        # tried again.
        grammar = await self._grammars.compile(message.grammar) if message.grammar else None
        return _to_row_request(message, grammar)

    async def Decode(
        self, requests: AsyncIterator[pb.DecodeRequest], context: Any
    ) -> AsyncIterator[pb.StepResponse]:
        """Advance the running requests, once for each message.

        Messages are read and handed to the device thread while it computes, so that it goes from
        one step to the next without waiting for an answer to be sent.
        """
        steps: asyncio.Queue[asyncio.Future[StepResult] | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read_steps(requests, steps))
        try:
            while (step := await steps.get()) is not None:
                yield _to_response(await step)
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
        steps: "asyncio.Queue[asyncio.Future[StepResult] | None]",
    ) -> None:
        """Queues a step for each message, and None behind the last."""
        loop = asyncio.get_running_loop()
        try:
            async for request in requests:
                batch_ids, advance = list(request.batch_ids), _to_advance(request.advance)
                decode = self._engine.decode
                steps.put_nowait(
                    loop.run_in_executor(self._device_thread, decode, batch_ids, advance)
                )
        finally:
            steps.put_nowait(None)


def _forget(step: "asyncio.Future[StepResult]") -> None:
    """Takes note of how a step ended behind one that failed: nobody asks for it any more."""
    if not step.cancelled():
        step.exception()


def _given(request: pb.WarmupRequest, name: Any) -> int | None:
    return int(getattr(request, name)) if request.HasField(name) else None


def _to_advance(message: pb.Advance) -> Advance:
    return Advance(
        grown=list(zip(message.grown_request_ids, message.grown_block_ids, strict=True)),
        chunks=list(zip(message.chunk_request_ids, message.chunk_lens, strict=True)),
        speculate=message.speculate,
        is_ahead=message.is_ahead,
    )


def _to_row_request(message: pb.Request, grammar: Grammar | None) -> RowRequest:
    chooser, stopping = message.parameters, message.stopping_parameters
    bias = zip(chooser.logit_bias_ids, chooser.logit_bias_values, strict=True)
    return RowRequest(
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
        prefill_logprobs=message.prefill_logprobs,
        top_n_tokens=message.top_n_tokens,
        grammar=grammar,
        chunk_len=message.chunk_len,
    )


def _to_response(result: StepResult) -> pb.StepResponse:
    response = pb.StepResponse(
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
            pb.PrefillLogprobs(request_id=request_id, logprobs=values)
            for request_id, values in result.prefill_logprobs
        ],
        errors=[
            pb.RequestError(request_id=request_id, message=message)
            for request_id, message in result.errors
        ],
        forward_ns=result.forward_ns,
        decode_ns=result.decode_ns,
        total_ns=result.total_ns,
        concat_ns=result.concat_ns,
    )
    if result.running_ids:
        response.batch.CopyFrom(pb.CachedBatch(id=result.batch_id, request_ids=result.running_ids))
    return response
