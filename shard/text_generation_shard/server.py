"""The shard process: loads the model, listens on the unix socket, stops on a signal."""

import asyncio
import logging
import os
import signal
import stat
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import torch
import uvloop
from text_generation_process.sockets import check_length, remove_stale
from text_generation_process.tracing import SERVICE, missing_packages
from text_generation_proto import pb_grpc

from text_generation_shard.config import ShardConfig
from text_generation_shard.device import open_device
from text_generation_shard.device.base import Device, DeviceOptions
from text_generation_shard.engine.engine import Engine
from text_generation_shard.errors import OTHER_RANK_FAILED, BatchError, ModelError, RankError
from text_generation_shard.models.registry import Chosen, load_model, read_config
from text_generation_shard.parallel import World
from text_generation_shard.rendezvous import Rendezvous
from text_generation_shard.sampling.table import Watermark
from text_generation_shard.service import ShardService

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from text_generation_shard.tracing import StepTracing

    # Generic in the stubs only.
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
    _Handler = grpc.RpcMethodHandler[Any, Any]
else:
    _Interceptor, _Handler = grpc.aio.ServerInterceptor, grpc.RpcMethodHandler


class ExceptionInterceptor(_Interceptor):
    """Turns exceptions into INTERNAL with the exception's text. Calls `on_fatal` after an error
    that leaves the device unusable."""

    def __init__(self, on_fatal: Callable[[], None]) -> None:
        self._on_fatal = on_fatal

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap a call: unary, or a stream in both directions."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        call: Any = handler.unary_unary or handler.stream_stream
        method = handler_call_details.method

        async def answer(request: Any, context: Any) -> Any:
            try:
                return await call(request, context)
            except Exception as error:
                await self._fail(method, error, context)

        async def answers(requests: Any, context: Any) -> Any:
            try:
                async for response in call(requests, context):
                    yield response
            except Exception as error:
                await self._fail(method, error, context)

        wire = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(answer, *wire)
        return grpc.stream_stream_rpc_method_handler(answers, *wire)

    async def _fail(self, method: str, error: Exception, context: Any) -> None:
        if isinstance(error, BatchError | ModelError):
            # The router logs it as an error: one ERROR line per failure.
            logger.warning("%s: %s", method, error)
        elif isinstance(error, RankError):
            # The failed rank logs the reason; `on_final` logs a final error.
            if not error.is_final:
                logger.warning("%s: %s", method, error)
        else:
            logger.error("%s failed", method, exc_info=error)
            if _is_fatal(error):
                self._on_fatal()
        await context.abort(grpc.StatusCode.INTERNAL, str(error) or type(error).__name__)


def _is_fatal(error: Exception) -> bool:
    """A CUDA error other than lack of memory makes the CUDA context unusable."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


# Prompts and prompt log-probabilities can be long; the socket is local.
_UNLIMITED = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
# Least size of an exchange between ranks, in bytes and in rows of float32.
_LEAST_SLOT_BYTES, _SLOT_ROWS = 8 << 20, 240
_PATH_FLAG = "--uds-path"


def serve(config: ShardConfig) -> int:
    """Serve until SIGTERM or SIGINT (exit code 0), a fatal device error (1), or until another shard
    is lost (3)."""
    check_length(config.socket_path, _PATH_FLAG)
    for sentence in missing_packages(config.otlp_endpoint):
        raise ModelError(sentence)
    # All computation, loading too, happens in one thread: OpenMP keeps a thread pool for each
    # thread that has computed, and more threads than cores slow each other down.
    device_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
    engine = device_thread.submit(load_engine, config).result()
    with ExitStack() as stack:
        # After every fork, because it starts threads; its exit sends the remaining spans.
        tracing = None
        if config.otlp_endpoint is not None:
            # Imports OpenTelemetry.
            from text_generation_shard.tracing import open_tracing

            tracing = stack.enter_context(open_tracing(config))
        return uvloop.run(_serve(engine, device_thread, config, tracing))


def load_engine(config: ShardConfig) -> Engine:
    """The model on the configured device, with the other ranks if there are several. ModelError:
    why it can not be served."""
    chosen = read_config(config)
    options = DeviceOptions(
        dtype=config.dtype,
        checkpoint_dtype=chosen.config.dtype,
        quantize=config.quantize,
        kv_cache_dtype=config.kv_cache_dtype,
        deterministic=config.deterministic,
        memory_fraction=config.cuda_memory_fraction,
        cuda_graphs=config.cuda_graphs,
        rank=config.rank,
        world_size=config.world_size,
    )
    device = open_device(config.device, options)
    if config.world_size == 1:
        return load_on(device, config, chosen, World())
    return _load_together(device, config, chosen)


def _load_together(device: Device, config: ShardConfig, chosen: Chosen) -> Engine:
    """Load together with the other ranks; returns when all have loaded. A failure of this rank is
    reported to the others. RankError: another rank has failed."""
    rendezvous = Rendezvous.join(config)
    try:
        # The largest exchange: longer tensors are split.
        slot_bytes = max(_LEAST_SLOT_BYTES, _SLOT_ROWS * 4 * chosen.config.hidden_size)
        collectives = device.collectives(rendezvous, slot_bytes)
        name = f"shard {config.rank} of {config.world_size}"
        logger.info("%s: all shards are connected by %s", name, collectives.name)
        meet = partial(rendezvous.all_here, "all have read their weights")
        world = World(config.rank, config.world_size, collectives, meet)
        engine = load_on(device, config, chosen, world)
        logger.info("%s has loaded its weights", name)
        rendezvous.all_here("all have loaded")
    except RankError:
        raise
    except BaseException as error:
        rendezvous.fail(str(error) or type(error).__name__)
        raise
    finally:
        rendezvous.close()
    return engine


def load_on(device: Device, config: ShardConfig, chosen: Chosen, world: World) -> Engine:
    """The model on an open device."""
    model, nbytes = load_model(config.model_path, chosen, device, world, config.quantize)
    if config.deterministic and not model.is_deterministic:
        raise ModelError(
            f"--deterministic is not supported with {chosen.config.architecture}: torch computes "
            "parts of it, and rounds them differently in other batches; remove the flag"
        )
    watermark = Watermark(config.watermark_gamma, config.watermark_delta)
    return Engine(device, model, nbytes, watermark, world)


def _listen(server: grpc.aio.Server, path: str) -> None:
    """Listen on a socket that only this user and root can connect to. ValueError: why not."""
    remove_stale(path, _PATH_FLAG)
    before = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix://{path}")
    except RuntimeError as error:
        raise ModelError(
            f"can not listen on {path} ({error}); choose another --uds-path"
        ) from error
    finally:
        os.umask(before)
    state = os.lstat(path)
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise ModelError(
            f"other users could connect to {path} (user {state.st_uid}, mode "
            f"{stat.S_IMODE(state.st_mode):04o}); choose another --uds-path, in a folder that "
            "other users can not write to"
        )


async def _serve(
    engine: Engine,
    device_thread: ThreadPoolExecutor,
    config: ShardConfig,
    tracing: "StepTracing | None" = None,
) -> int:
    stopped = asyncio.Event()
    exit_code = 0

    def on_fatal() -> None:
        nonlocal exit_code
        exit_code = 1
        logger.error("the device can not go on after this error, the shard stops")
        stopped.set()

    def on_final(error: RankError) -> None:
        """Another rank is lost. The same error while this rank stops is ignored."""
        nonlocal exit_code
        if not stopped.is_set():
            exit_code = OTHER_RANK_FAILED
            logger.error("%s; this shard can not go on without it", error)
            stopped.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    service = ShardService(engine, device_thread, config, on_final, tracing)
    server = grpc.aio.server(interceptors=[ExceptionInterceptor(on_fatal)], options=_UNLIMITED)
    pb_grpc.add_TextGenerationServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    if config.enable_reflection:
        # Lets tools like grpcurl list the calls.
        from grpc_reflection.v1alpha import reflection

        names = (SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    _listen(server, config.socket_path)
    await server.start()
    engine.device.serve()
    logger.info("Server started at unix://%s", config.socket_path)
    await stopped.wait()
    # Ends a long prompt between two passes, and any wait for another rank; later calls fail.
    engine.stop()
    await server.stop(grace=0.5)
    service.close()
    return exit_code
