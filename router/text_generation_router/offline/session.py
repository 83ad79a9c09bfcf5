"""The router's part of an `LLM`: its options, and its event loop in a thread of its own."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvloop
from anyio.from_thread import BlockingPortal, start_blocking_portal
from text_generation_process.flags import OPTIONS
from text_generation_process.option import Child, Mode

from text_generation_router.config import RouterConfig
from text_generation_router.offline.shards_process import ShardsAddress
from text_generation_router.services import Services, start

OptionValue = str | int | float | bool | Path | None

# Options of a batch file that an `LLM` does not have: it has no files and no clients.
_NOT_OFFLINE = frozenset(
    {
        *("input", "output", "env", "json_output", "shard_uds_path", "max_input_length"),
        *("payload_limit", "served_model_name", "any_model_name", "max_best_of"),
        *("max_concurrent_requests", "max_client_batch_size"),
    }
)
# No limits that protect a server from its clients.
_NO_LIMIT = 2**31 - 1
_OFFLINE_LIMITS = {"max_stop_sequences": _NO_LIMIT, "max_top_n_tokens": 100}

# The results have the errors: they are logged only if the user configures logging.
logging.getLogger("text_generation_router.infer").addHandler(logging.NullHandler())


def sort_options(
    model: str | Path | None, given: Mapping[str, OptionValue]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The flags for `text-generation-launcher shards`, which validates them, and the fields of
    RouterConfig. None means "not given". The launcher's table of flags says who gets an option.

    Raises TypeError for an unknown option, ValueError for one that has no effect without HTTP or
    has an invalid value.
    """
    options = {option.name.replace("-", "_"): option for option in OPTIONS}
    known = {name for name, one in options.items() if one.applies_in(Mode.BATCH)} - _NOT_OFFLINE
    shard_flags: list[str] = []
    router: dict[str, Any] = {}
    for name, value in {"model_id": model, **given}.items():
        if name not in options:
            raise TypeError(f"LLM has no option `{name}`; see `help(LLM)`")
        if value is None:
            continue
        if name not in known:
            raise ValueError(f"`{name}` is an option of the server; remove it")
        option = options[name]
        if Child.ROUTER in option.to:
            router[name] = str(value) if isinstance(value, Path) else value
        if option.to == (Child.ROUTER,):
            continue
        if option.switch and isinstance(value, bool):
            shard_flags += [option.flag] * value
        else:
            written = str(value).lower() if isinstance(value, bool) else value
            shard_flags.append(f"{option.flag}={written}")
    router_config(router, ShardsAddress("", "", ""))  # validates before the model is loaded
    return tuple(shard_flags), router


def router_config(options: Mapping[str, Any], address: ShardsAddress) -> RouterConfig:
    """The configuration of the router's part. Raises ValueError."""
    rows = {"max_batch_size": RouterConfig(tokenizer_name="").batch_rows}
    return RouterConfig(
        tokenizer_name=address.model_path,
        model_id=address.model_id,
        master_shard_uds_path=address.master_shard_uds_path,
        max_concurrent_requests=_NO_LIMIT,
        **{**_OFFLINE_LIMITS, **rows, **options},
    )


@contextmanager
def running_services(config: RouterConfig) -> Iterator[tuple[BlockingPortal, Services]]:
    """The services of one model, and the way into their event loop, which runs in a thread of its
    own. The caller may have an event loop, as notebooks do. Raises StartError.

    At the end of the block running requests end with an error, and the thread ends.
    """
    loop = {"loop_factory": uvloop.new_event_loop}
    with (
        start_blocking_portal("asyncio", loop) as portal,
        portal.wrap_async_context_manager(_serve(config)) as services,
    ):
        yield portal, services


@asynccontextmanager
async def _serve(config: RouterConfig) -> AsyncIterator[Services]:
    asyncio.get_running_loop().set_exception_handler(_ignore_other_loops)
    async with start(config) as services, services.batcher.running():
        yield services


def _ignore_other_loops(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Reports errors except a harmless one: an event of gRPC wakes up every loop that uses gRPC,
    and all but one find its socket empty."""
    handle = repr(context.get("handle", "")) + str(context.get("message", ""))
    is_noise = isinstance(context.get("exception"), BlockingIOError)
    if not (is_noise and "PollerCompletionQueue" in handle):
        loop.default_exception_handler(context)
