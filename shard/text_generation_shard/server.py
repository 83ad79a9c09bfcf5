"""The shard process: loads the model, listens on the unix socket, stops on a signal."""

import asyncio
import logging
import os
import signal
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import grpc
import torch
import uvloop
from text_generation_process.flags import ShardConfig
from text_generation_process.sockets import check_length, remove_stale
from text_generation_process.tracing import SERVICE, missing_packages, open_tracer
from text_generation_proto import pb_grpc

from text_generation_shard.checkpoint.config import ModelConfig
from text_generation_shard.device import open_device
from text_generation_shard.device.base import DeviceOptions
from text_generation_shard.device.reference.device import Device
from text_generation_shard.engine.engine import Engine
from text_generation_shard.errors import OTHER_RANK_FAILED, BatchError, ModelError, RankError
from text_generation_shard.models.registry import load_model, read_config
from text_generation_shard.parallel import Rendezvous, World
from text_generation_shard.sampling import Watermark
from text_generation_shard.service import ShardService, guarded

if TYPE_CHECKING:
    from text_generation_shard.tracing import StepTracing

logger = logging.getLogger(__name__)


async def fail_call(
    on_fatal: Callable[[], None], name: str, error: Exception, context: Any
) -> None:
    """End a call as INTERNAL with the exception's text. Calls `on_fatal` after an error that leaves
    the device unusable."""
    if isinstance(error, BatchError | ModelError | RankError):
        # The router logs it as an error: one ERROR line per failure. A failed rank logs the reason
        # itself, and `on_final` a final error.
        if not (isinstance(error, RankError) and error.is_final):
            logger.warning("%s: %s", name, error)
    else:
        logger.error("%s failed", name, exc_info=error)
        if _is_fatal(error):
            on_fatal()
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
            from text_generation_shard.tracing import StepTracing

            name, attributes = config.otlp_service_name, {"rank": config.rank}
            tracer = open_tracer(config.otlp_endpoint, name, version("pytgi"), attributes)
            tracing = StepTracing(stack.enter_context(tracer), config.rank)
        return uvloop.run(_serve(engine, device_thread, config, tracing))


def load_engine(config: ShardConfig) -> Engine:
    """The model on the configured device; with several ranks, when all have loaded. ModelError: why
    it can not be served. RankError: another rank has failed."""
    model = read_config(config)
    options = DeviceOptions(
        dtype=config.dtype,
        checkpoint_dtype=model.dtype,
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
        return load_on(device, config, model, World())
    with Rendezvous.join(config) as rendezvous:
        # The largest exchange: longer tensors are split.
        slot_bytes = max(_LEAST_SLOT_BYTES, _SLOT_ROWS * 4 * model.hidden_size)
        collectives = device.collectives(rendezvous, slot_bytes)
        name = f"shard {config.rank} of {config.world_size}"
        logger.info("%s: all shards are connected by %s", name, collectives.name)
        meet = partial(rendezvous.all_here, "all have read their weights")
        world = World(config.rank, config.world_size, collectives, meet)
        engine = load_on(device, config, model, world)
        logger.info("%s has loaded its weights", name)
        rendezvous.all_here("all have loaded")
        return engine


def load_on(device: Device, config: ShardConfig, model: ModelConfig, world: World) -> Engine:
    """The model on an open device."""
    loaded, nbytes = load_model(config.model_path, model, device, world, config.quantize)
    if config.deterministic and not loaded.is_deterministic:
        raise ModelError(
            f"--deterministic is not supported with {model.architecture}: torch computes "
            "parts of it, and rounds them differently in other batches; remove the flag"
        )
    watermark = Watermark(config.watermark_gamma, config.watermark_delta)
    return Engine(device, loaded, nbytes, watermark, world)


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
    loop = asyncio.get_running_loop()
    exit_code: asyncio.Future[int] = loop.create_future()

    def stop(code: int, error: str) -> None:
        """Later errors are ignored: they are often effects of stopping."""
        if not exit_code.done():
            if error:
                logger.error("%s", error)
            exit_code.set_result(code)

    def on_final(error: RankError) -> None:
        stop(OTHER_RANK_FAILED, f"{error}; this shard can not go on without it")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, 0, "")
    on_fatal = partial(stop, 1, "the device can not go on after this error, the shard stops")
    fail = partial(fail_call, on_fatal)
    service = ShardService(engine, device_thread, config, on_final, tracing, fail)
    server = grpc.aio.server(options=_UNLIMITED)
    pb_grpc.add_TextGenerationServiceServicer_to_server(guarded(service, fail), server)  # type: ignore[no-untyped-call]
    if config.enable_reflection:
        # Lets tools like grpcurl list the calls.
        from grpc_reflection.v1alpha import reflection

        reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), server)
    _listen(server, config.socket_path)
    await server.start()
    engine.device.serve()
    logger.info("Server started at unix://%s", config.socket_path)
    await exit_code
    # Ends a long prompt between two passes, and any wait for another rank; later calls fail.
    engine.stop()
    await server.stop(grace=0.5)
    service.close()
    return exit_code.result()
