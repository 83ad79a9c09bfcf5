"""`text-generation-router`: flags to `RouterConfig`, start-up in order, HTTP until SIGTERM."""

import argparse
import asyncio
import dataclasses
import gc
import logging
import signal
import socket
import sys
import types
from contextlib import AsyncExitStack
from typing import Any, get_args, get_origin, get_type_hints

import orjson
import uvicorn
import uvloop
from fastapi import FastAPI

from text_generation_router.app import create_app
from text_generation_router.config import RouterConfig, flag, flags
from text_generation_router.front import Front
from text_generation_router.logs import configure_logs
from text_generation_router.scheduler.batcher import Batcher
from text_generation_router.services import StartError, start

# Requests may go on for this share of the graceful termination time, and are ended then, so that
# their clients can take what is left before whoever sent SIGTERM loses patience.
RUNNING_SHARE = 0.9
CLOSING_SHARE = 0.95
# An idle connection is kept for so long: longer than the pools of usual proxies and clients.
KEEP_ALIVE_S = 75
# Connections that wait to be taken; the kernel's own limit is often the same.
BACKLOG = 4096

logger = logging.getLogger("text_generation_router")


def main(arguments: list[str] | None = None) -> None:
    """Runs the router until SIGTERM; a start-up that fails is one ERROR line and exit code 1."""
    parser = create_parser()
    options = vars(parser.parse_args(arguments))
    if options.pop("command") == "print-schema":
        app = create_app(RouterConfig(tokenizer_name=""))
        print(orjson.dumps(app.openapi(), option=orjson.OPT_INDENT_2).decode())
        return
    if options["tokenizer_name"] is None:
        parser.error("--tokenizer-name is required: the directory with the model's tokenizer.json")
    configure_logs(options["logger_level"], options["json_output"])
    try:
        config = RouterConfig(**options)
        calm_garbage_collector()
        uvloop.run(serve(config))
    except KeyboardInterrupt:
        logger.info("Interrupted before the server was up")
    except (StartError, ValueError) as error:
        logger.error("%s", error)
        sys.exit(1)
    except Exception as error:
        logger.error("The router failed: %s: %s", type(error).__name__, error)
        logger.debug("Where it failed", exc_info=error)
        sys.exit(1)


def create_parser() -> argparse.ArgumentParser:
    """The router's own command line."""
    parser = argparse.ArgumentParser(
        prog="text-generation-router",
        description="HTTP front and scheduler of pytgi.",
        allow_abbrev=False,
    )
    parser.add_argument("command", nargs="?", choices=["print-schema"], help="Print the OpenAPI.")
    add_flags(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per field of `RouterConfig`, with its default."""
    hints = get_type_hints(RouterConfig)
    for name, default, text, keywords in flags():
        if default is dataclasses.MISSING:
            default = None
        keywords = {**_parsing(hints[name]), **keywords}
        parser.add_argument(flag(name), default=default, help=text, **keywords)


async def serve(config: RouterConfig) -> None:
    """Takes the port, starts everything behind it, listens, and ends in order on SIGTERM."""
    async with AsyncExitStack() as stack:
        sockets = [stack.enter_context(bind(config.hostname, config.port))]
        if config.prometheus_port is not None:
            sockets.append(stack.enter_context(bind(config.hostname, config.prometheus_port)))
        services = await stack.enter_async_context(start(config))
        patience_s = config.graceful_termination_timeout
        uvicorn_config = server_config(create_app(config, services), patience_s)
        server = Server(uvicorn_config, services.batcher, patience_s * RUNNING_SHARE)
        # uvicorn raises the signal that stopped it once more at its end; that must not kill us.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _announce)
        address, port = sockets[0].getsockname()[:2]
        logger.info("Serving %s on %s port %d", config.served_model_id, address, port)
        logger.info("Connected")
        await server.serve(sockets=sockets)


class Server(uvicorn.Server):
    """Lets running requests finish when it is told to stop, and after `running_s` ends them."""

    def __init__(self, config: uvicorn.Config, batcher: Batcher, running_s: float) -> None:
        super().__init__(config)
        self._batcher = batcher
        self._running_s = running_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more connections and returns when the last one is closed."""
        logger.info("signal received, starting graceful shutdown")
        deadline = asyncio.create_task(self._end_late_requests())
        await super().shutdown(sockets)
        deadline.cancel()

    async def _end_late_requests(self) -> None:
        await asyncio.sleep(self._running_s)
        logger.warning("Requests still run after %g s; they are ended now", self._running_s)
        await self._batcher.close()


def server_config(app: FastAPI, patience_s: float) -> uvicorn.Config:
    """How uvicorn runs the app: no access log, no headers of its own but the date."""
    return uvicorn.Config(
        Front(app),
        loop="none",
        http="httptools",
        ws="none",
        # As many as may come at once; what the queue can not take waits a second for another try.
        backlog=BACKLOG,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        # Whole seconds in uvicorn's own annotations, but it waits for fractions as well.
        timeout_graceful_shutdown=patience_s * CLOSING_SHARE,  # type: ignore[arg-type]
    )


def calm_garbage_collector() -> None:
    """Makes collections as rare as the router's garbage is.

    What a token leaves behind is freed when nobody refers to it, and so is nearly all of a request;
    with Python's own thresholds a step of 512 rows set off several collections, which took a sixth
    of the router's time.
    """
    gc.freeze()
    gc.set_threshold(50_000, 5, 5)


def bind(hostname: str, port: int) -> socket.socket:
    """A socket that nobody else gets and that does not listen yet. Raises StartError."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Without the protocol, asyncio does not turn TCP_NODELAY on and every answer waits 40 ms.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise StartError(
            f"Can not listen on {hostname} port {port}: {error.strerror}; choose another with "
            "--port, --prometheus-port or --hostname"
        ) from error
    return listener


def _announce(number: int, frame: types.FrameType | None) -> None:
    """Runs when uvicorn hands its signal on, after the last response."""
    logger.info("Stopped by %s", signal.Signals(number).name)


class _Append(argparse.Action):
    """Collects the values of a flag that is given several times."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), values))


def _parsing(hint: Any) -> dict[str, Any]:
    """What argparse needs to know to make a value of this type."""
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is tuple:
        return {"action": _Append}
    if get_origin(hint) is types.UnionType:
        (hint,) = (part for part in get_args(hint) if part is not types.NoneType)
    return {"type": hint}


if __name__ == "__main__":
    main()
