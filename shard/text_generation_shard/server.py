"""The shard process: load the model, listen on the unix socket, stop on a signal."""

import asyncio
import logging
import os
import signal
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import grpc
import uvloop
from text_generation_proto import pb, pb_grpc

from text_generation_shard.checkpoint.config import ModelConfig
from text_generation_shard.config import ShardConfig
from text_generation_shard.device import open_device
from text_generation_shard.device.base import Device, DeviceOptions
from text_generation_shard.engine.engine import Engine
from text_generation_shard.errors import OTHER_RANK_FAILED, ModelError, RankError
from text_generation_shard.interceptor import ExceptionInterceptor
from text_generation_shard.meeting import Meeting
from text_generation_shard.models.registry import load_model
from text_generation_shard.parallel import World
from text_generation_shard.sampling.table import Watermark
from text_generation_shard.service import ShardService

logger = logging.getLogger(__name__)

# Prompts and prompt log-probabilities can be long; the socket is local.
_UNLIMITED = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
# What ranks exchange at once: bytes at least, or rows of float32.
_LEAST_SLOT_BYTES, _SLOT_ROWS = 8 << 20, 240
# A unix socket's path must fit in sockaddr_un with its closing 0.
_MAX_PATH_BYTES = 107


def serve(config: ShardConfig) -> int:
    """Serve until SIGTERM or SIGINT (exit code 0), a fatal device error (1), or until another shard
    is lost (3)."""
    _check_path(config.socket_path)
    # OpenMP keeps a pool of workers for each thread that ever computed, and more of them than cores
    # slow each other down: everything that computes, loading too, happens in one thread.
    device_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
    loaded = device_thread.submit(_load, config).result()
    return uvloop.run(_serve(loaded.engine, device_thread, config))


def load_engine(config: ShardConfig) -> Engine:
    """The model on the device that is asked for, of one shard alone; ModelError says in one
    sentence why it can not be served."""
    assert config.world_size == 1, "what several ranks keep while they serve is lost here"
    return _load(config).engine


class _Loaded(NamedTuple):
    """What is kept as long as this process serves."""

    engine: Engine
    # None: there is one rank. With that of rank 0 ends what all ranks read, some of them later.
    meeting: Meeting | None = None


def _load(config: ShardConfig) -> _Loaded:
    options = DeviceOptions(
        dtype=config.dtype,
        checkpoint_dtype=_model_config(config).dtype,
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
        return _Loaded(load_on(device, config, World()))
    return _load_together(device, config)


def _load_together(device: Device, config: ShardConfig) -> _Loaded:
    """The model with the other ranks: none goes on before all have loaded. RankError: another one
    has failed; then, too, the others are told of this one's own failure."""
    dtype = str(device.dtype).removeprefix("torch.")
    meeting = Meeting.join(config, device.name, dtype)
    try:
        collectives = device.collectives(meeting, _slot_bytes(config))
        logger.info(
            "shard %d of %d: all have met, and talk by %s",
            *(config.rank, config.world_size, collectives.name),
        )
        engine = load_on(device, config, World(config.rank, config.world_size, collectives))
        logger.info("shard %d of %d has loaded its weights", config.rank, config.world_size)
        meeting.all_here("all have loaded")
    except RankError:
        raise
    except BaseException as error:
        meeting.fail(str(error) or type(error).__name__)
        raise
    finally:
        meeting.close()
    return _Loaded(engine, meeting)


def _slot_bytes(config: ShardConfig) -> int:
    """What a rank gives the others at once of a pass of many rows; more goes in pieces."""
    return max(_LEAST_SLOT_BYTES, _SLOT_ROWS * 4 * _model_config(config).hidden_size)


def load_on(device: Device, config: ShardConfig, world: World) -> Engine:
    """The same on a device that is open."""
    model_config = _model_config(config)
    model, nbytes = load_model(config.model_path, model_config, device, world, config.quantize)
    watermark = Watermark(config.watermark_gamma, config.watermark_delta)
    return Engine(device, model, nbytes, watermark, world)


def _model_config(config: ShardConfig) -> ModelConfig:
    return ModelConfig.from_hf(config.model_path, config.rope_scaling, config.rope_factor)


def _check_path(path: str) -> None:
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ModelError(
            f"the socket path {path} has {len(os.fsencode(path))} bytes, unix sockets allow "
            f"{_MAX_PATH_BYTES}; choose a shorter --uds-path"
        )


def _remove_stale_socket(path: str) -> None:
    """Make room for a new socket; ModelError if what is there is not a dead one."""
    if not os.path.lexists(path):
        return
    state = os.lstat(path)
    if not stat.S_ISSOCK(state.st_mode):
        raise ModelError(f"{path} exists and is not a socket; choose another --uds-path")
    if state.st_uid != os.geteuid():
        raise ModelError(
            f"{path} is a socket of user {state.st_uid}, and this shard runs as user "
            f"{os.geteuid()}; have it removed or choose another --uds-path"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            raise ModelError(f"another server listens on {path}; choose another --uds-path")
    os.unlink(path)


def _listen(server: grpc.aio.Server, path: str) -> None:
    """Only our own user, and root, can connect: a socket takes that, as a file takes its readers,
    from its mode. ModelError if there can be none."""
    _remove_stale_socket(path)
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
            f"others could connect to {path} (user {state.st_uid}, mode "
            f"{stat.S_IMODE(state.st_mode):04o}); choose another --uds-path, in a folder that "
            "others can not write to"
        )


def _enable_reflection(server: grpc.aio.Server) -> None:
    """Let tools like grpcurl ask what is served."""
    from grpc_reflection.v1alpha import reflection

    names = (
        pb.DESCRIPTOR.services_by_name["TextGenerationService"].full_name,
        reflection.SERVICE_NAME,
    )
    reflection.enable_server_reflection(names, server)


async def _serve(engine: Engine, device_thread: ThreadPoolExecutor, config: ShardConfig) -> int:
    stopped = asyncio.Event()
    exit_code = 0

    def on_fatal() -> None:
        nonlocal exit_code
        exit_code = 1
        logger.error("the device can not go on after this error, the shard stops")
        stopped.set()

    def on_final(error: RankError) -> None:
        """Another rank is lost, or this one is stopping, which its operations then say, too."""
        nonlocal exit_code
        if not stopped.is_set():
            exit_code = OTHER_RANK_FAILED
            logger.error("%s; this shard can not go on without it", error)
            stopped.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    service = ShardService(engine, device_thread, config, on_final)
    server = grpc.aio.server(interceptors=[ExceptionInterceptor(on_fatal)], options=_UNLIMITED)
    pb_grpc.add_TextGenerationServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    if config.enable_reflection:
        _enable_reflection(server)
    _listen(server, config.socket_path)
    await server.start()
    engine.device.serve()
    logger.info("Server started at unix://%s", config.socket_path)
    await stopped.wait()
    # A prompt of many pieces ends between two of them, and no other rank is waited for; what is
    # asked for then fails.
    engine.stop()
    await server.stop(grace=0.5)
    service.close()
    return exit_code
