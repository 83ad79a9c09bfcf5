"""`text-generation-router`: parses flags, starts the services in order, serves until SIGTERM."""

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING

import orjson
import uvloop
from text_generation_process.log import LineFormatter, Output, raise_file_limit, send_to_output
from text_generation_process.option import add_flags
from text_generation_process.tracing import open_tracer

from text_generation_router.app import create_app, create_closed
from text_generation_router.config import VERSION, RouterConfig
from text_generation_router.edge.front import Front
from text_generation_router.edge.keys import Keys
from text_generation_router.request_options import request_fields
from text_generation_router.server import Certificate, Server, bind
from text_generation_router.services import StartError, start
from text_generation_router.state import LauncherLink, ServerState

if TYPE_CHECKING:
    from text_generation_router.tracing.requests import TracedRequests

logger = logging.getLogger("text_generation_router")

# Open files besides one connection for each request: listeners, shards, log.
_OTHER_FILES = 64


def main(arguments: list[str] | None = None) -> None:
    """Runs the router until SIGTERM; a failed start is one ERROR line and exit code 1."""
    parser = create_parser()
    options = vars(parser.parse_args(arguments))
    if options.pop("command") == "print-schema":
        app = create_app(RouterConfig(tokenizer_name=""))
        print(orjson.dumps(app.openapi(), option=orjson.OPT_INDENT_2).decode())
        return
    if options["tokenizer_name"] is None:
        parser.error("--tokenizer-name is required: the directory with the model's tokenizer.json")
    options["api_key"] = options["api_key"] or keys_from(os.environ)
    log = configure_logs(options["logger_level"], options["json_output"])
    try:
        config = RouterConfig(**options)
        _warn_of_few_files(config, raise_file_limit())
        with ExitStack() as stack:
            # The last traces are sent after everything else has ended.
            tracing = _open_tracing(config, stack)
            calm_garbage_collector()
            code = uvloop.run(serve(config, lambda: log.num_dropped, tracing))
    except KeyboardInterrupt:
        logger.info("Interrupted before the server was up")
    except (StartError, ValueError) as error:
        logger.error("%s", error)
        sys.exit(1)
    except Exception as error:
        logger.error("The router failed: %s: %s", type(error).__name__, error)
        logger.debug("Where it failed", exc_info=error)
        sys.exit(1)
    else:
        sys.exit(code)


def create_parser() -> argparse.ArgumentParser:
    """The router's own command line."""
    parser = argparse.ArgumentParser(
        prog="text-generation-router",
        description="HTTP front and scheduler of pytgi.",
        allow_abbrev=False,
    )
    parser.add_argument("command", nargs="?", choices=["print-schema"], help="Print the OpenAPI.")
    add_flags(parser, RouterConfig)
    return parser


def configure_logs(level: str, json_output: bool) -> Output:
    """Sends every log line of this process to standard output; see `send_to_output`."""
    formatter = LineFormatter(json_output, request_fields)
    output = send_to_output(level, formatter, "text_generation_router")
    # uvicorn logs its start at INFO and failures from WARNING on.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_new)
    return output


def _is_new(record: logging.LogRecord) -> bool:
    """False for uvicorn's line about a stream that was aborted: `EventStream` has logged why."""
    return record.msg != "ASGI callable returned without completing response."


def keys_from(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys in API_KEY, one per line. An environment variable, because every user of the machine
    can read the command line of a process. An empty variable is one empty key."""
    given = environment.get("API_KEY")
    return () if given is None else tuple(given.splitlines() or [""])


def _open_tracing(config: RouterConfig, stack: ExitStack) -> "TracedRequests | None":
    """Imports OpenTelemetry only if traces are on."""
    if (endpoint := config.otlp_endpoint) is None:
        return None
    from text_generation_router.tracing.requests import TracedRequests

    tracer = stack.enter_context(open_tracer(endpoint, config.otlp_service_name, VERSION, {}))
    return TracedRequests(tracer, config.model_names[0])


async def serve(
    config: RouterConfig,
    num_lines_dropped: Callable[[], int] = int,
    tracing: "TracedRequests | None" = None,
) -> int:
    """Takes the port, starts the services, listens, and shuts down in order on SIGTERM.

    Returns the exit code: 0 after one signal, 1 if a second signal ended requests, the shards are
    declared lost or the scheduler has failed.
    """
    certificate = Certificate.of(config)
    keys = Keys.of(config)  # first, so that a bad file is an error before the model is loaded
    state = ServerState()
    launcher = LauncherLink(config.launcher_fd, state)
    async with AsyncExitStack() as stack:
        stack.callback(launcher.close)
        launcher.begin()
        sockets = [stack.enter_context(bind(config.hostname, config.port))]
        if config.prometheus_port is not None:
            sockets.append(stack.enter_context(bind(config.hostname, config.prometheus_port)))
        front = Front(create_closed(config, state))
        around = front if tracing is None else tracing.around(front)
        server = Server(around, front, config, state, certificate)
        serving = await stack.enter_async_context(server.serving(sockets))
        services = await stack.enter_async_context(start(config, tracing, state))
        services.watch.report_loss = launcher.lost
        services.metrics.log_lines_dropped.read = num_lines_dropped
        app = create_app(config, services, keys)
        await stack.enter_async_context(app.router.lifespan_context(app))
        server.open(app, services)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.handle_exit, number, None)
        address, port = sockets[0].getsockname()[:2]
        logger.info("Serving %s on %s port %d", config.served_model_id, address, port)
        logger.info("Connected")
        await serving
        for number in server.stopped_by:
            logger.info("Stopped by %s", number.name)
    if server.failure is not None:
        logger.error("%s; the server exits so that it can be restarted", server.failure)
        return 1
    return int(server.force_exit)


def _warn_of_few_files(config: RouterConfig, limit: int) -> None:
    needed = config.max_concurrent_requests + _OTHER_FILES
    if 0 <= limit < needed:
        logger.warning(
            "This process may open %d files (ulimit -Hn), and --max-concurrent-requests %d takes "
            "up to %d: raise the limit, or some connections will be refused",
            limit,
            config.max_concurrent_requests,
            needed,
        )


def calm_garbage_collector() -> None:
    """Makes garbage collections rare.

    Reference counts free nearly everything that a token or a request allocates. With Python's
    default thresholds one step of many rows triggers several collections.
    """
    gc.freeze()
    gc.set_threshold(50_000, 5, 5)


if __name__ == "__main__":
    main()
