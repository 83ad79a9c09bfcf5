"""The HTTP server around the application: its ports and its shutdown."""

import asyncio
import logging
import math
import os
import socket
import types
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Literal

import uvicorn
from starlette.types import ASGIApp
from text_generation_process.ports import NameHeldError, bind_port, claim_port

from text_generation_router.config import RouterConfig
from text_generation_router.edge.certificate import Certificate
from text_generation_router.edge.connection import ConnectionLimits, Connections
from text_generation_router.edge.front import Front
from text_generation_router.metrics import Metrics
from text_generation_router.services import Services, StartError

# Shares of the graceful termination time: until the first, requests may run; between the two, their
# clients read the last events. The rest is kept for the exit, before SIGKILL.
RUNNING_SHARE = 0.9
CLOSING_SHARE = 0.95
# The graceful termination time when the shards or the scheduler have failed.
LOST_PATIENCE_S = 2.0
# After a second signal: the time in which clients read the last events.
HASTE_S = 1.0
# How often a shutdown checks whether the last request has ended.
DRAIN_POLL_S = 0.02
# Ticks (of 0.1 s) between two checks whether another connection could be accepted.
TICKS_PER_LOOK = 10
# Longer than the connection pools of usual proxies and clients keep an idle connection.
KEEP_ALIVE_S = 75
# Connections that wait to be accepted; the kernel's own limit is often the same.
BACKLOG = 4096
# Ticks between two checks of the certificate's files.
CERTIFICATE_TICKS = 20
# The event loop accepts one connection per listener and turn. With one listener, a connection that
# arrives after thousands of others (a health check, too) waits for seconds.
ACCEPTS_PER_TURN = 16

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Serves until a signal, or until the shards are declared lost or the scheduler fails.

    After the first signal new requests get 503, and running requests may end while there are
    shards; the Batcher ends those that take too long. A second signal ends them at once. Each gets
    its last event.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        front: Front,
        services: Services,
        patience_s: float,
        certificate: Certificate | None = None,
    ) -> None:
        super().__init__(config)
        self._front = front
        self._services = services
        self._patience_s = patience_s
        self._certificate = certificate
        self._is_full = False

    @property
    def failure(self) -> str | None:
        """Why it can not serve any more, in one sentence; None while it can."""
        watch = self._services.watch
        if watch.verdict is not None:
            return ": ".join(filter(None, (watch.verdict, watch.detail)))
        return self._services.batcher.failure

    def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
        """Called for every signal; the first one stops new requests immediately."""
        self.force_exit = self.should_exit
        self._front.close()
        self._services.state.draining()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens. Raises StartError if another program now listens on the port."""
        assert sockets is not None
        listeners = [*multiplied(sockets[0]), *sockets[1:]]
        try:
            await super().startup(listeners)
        except OSError as error:
            for listener in listeners:
                listener.close()
            await self.lifespan.shutdown()
            raise StartError(
                f"Can not listen any more: {error.strerror}; another program took the port while "
                "the model was loading"
            ) from error

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop now; uvicorn calls it ten times a second."""
        if self._certificate is not None and counter % CERTIFICATE_TICKS == 0:
            self._certificate.refresh()
        if counter % TICKS_PER_LOOK == 0:
            self._look_for_room()
        self._note_state()
        return await super().on_tick(counter) or self.failure is not None

    def _note_state(self) -> None:
        state = self._services.state
        if self.failure is not None:
            state.failed(self.failure)
        elif self._services.watch.is_down:
            state.restarting()
        else:
            state.ready()

    def _look_for_room(self) -> None:
        """Logs once that no connection can be accepted. libuv does not report it: it closes new
        connections until another one ends."""
        try:
            os.close(os.dup(1))
        except OSError as error:
            if not self._is_full:
                logger.warning(
                    "Can not accept connections: %s; raise the number of files that this process "
                    "may open (ulimit -Hn), or lower --max-concurrent-requests",
                    error.strerror,
                )
            self._is_full = True
        else:
            self._is_full = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns after the last answer, when the last connection is closed."""
        self._front.close()
        clock = asyncio.get_running_loop().time
        if self.failure is not None:
            self._patience_s = min(self._patience_s, LOST_PATIENCE_S)
        closed_at = clock() + self._patience_s * CLOSING_SHARE
        await self._drain(clock() + self._patience_s * RUNNING_SHARE)
        await self._services.batcher.close()
        if self.force_exit:
            await self._hasten(clock() + HASTE_S)
            # With no time left uvicorn cancels the tasks, and logs it even if there are none.
            closed_at = clock() + (0.0 if self.server_state.tasks else HASTE_S)
        # uvicorn's annotation says whole seconds, but fractions work.
        left_s = max(0.0, closed_at - clock())
        self.config.timeout_graceful_shutdown = left_s  # type: ignore[assignment]
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn does not end the lifespan then, and logs a traceback when the loop closes.
            with suppress(TimeoutError):
                async with asyncio.timeout(HASTE_S):
                    await self.lifespan.shutdown()

    async def _drain(self, deadline: float) -> None:
        """Waits until no request runs, or until the deadline."""
        logger.info("Stopping: waiting for %d running requests", self._front.num_running)
        while self._front.num_running and not self.force_exit:
            if self._services.watch.is_down:
                logger.warning("The shards are down; running requests are ended now")
                return
            if asyncio.get_running_loop().time() > deadline:
                share_s = self._patience_s * RUNNING_SHARE
                logger.warning("Requests still run after %g s and are ended now", share_s)
                return
            await asyncio.sleep(DRAIN_POLL_S)

    async def _hasten(self, deadline: float) -> None:
        """Waits until all ended requests have sent their last event, or until the deadline."""
        while self._front.num_running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)


def server_config(
    app: ASGIApp,
    services: Services,
    limits: ConnectionLimits | None = None,
    certificate: Certificate | None = None,
) -> uvicorn.Config:
    """uvicorn's configuration: no access log, and only the date as a header of its own."""
    limits = limits or ConnectionLimits.of(services.config.payload_limit)
    connections = Connections(limits, services.metrics.connections_refused)
    return _uvicorn_config(app, connections, certificate, "on")


def _uvicorn_config(
    app: ASGIApp,
    connections: Connections,
    certificate: Certificate | None,
    lifespan: Literal["on", "off"],
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http=connections.protocol,
        ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
        ws="none",
        # Large, because a connection that does not fit waits a second before it is tried again.
        backlog=BACKLOG,
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


@asynccontextmanager
async def answering(
    sockets: Sequence[socket.socket],
    app: ASGIApp,
    config: RouterConfig,
    certificate: Certificate | None,
) -> AsyncIterator[Callable[[], None]]:
    """Serves `app` on these ports until the yielded function is called. From then on connections
    wait in the backlog for the next server. The block ends after the last answer.
    Raises StartError."""
    refused = Metrics(1, 2).connections_refused
    connections = Connections(ConnectionLimits.of(config.payload_limit), refused)
    settings = _uvicorn_config(app, connections, certificate, "off")
    settings.load()
    server = uvicorn.Server(settings)
    server.lifespan = settings.lifespan_class(settings)
    settings.timeout_graceful_shutdown = math.ceil(LOST_PATIENCE_S)
    listeners = [one.dup() for one in sockets]
    try:
        await server.startup(listeners)
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise StartError(
            f"Can not listen: {error.strerror}; another program has taken the port"
        ) from error
    main_loop = asyncio.create_task(server.main_loop())

    def close() -> None:
        server.should_exit = True
        for one in server.servers:
            one.close()
        # Clients that keep connections open a new one, to the next server.
        for connection in list(server.server_state.connections):
            connection.shutdown()

    try:
        yield close
    finally:
        close()
        await main_loop
        await server.shutdown(listeners)


def multiplied(listener: socket.socket) -> list[socket.socket]:
    """Several listeners on one port, see `ACCEPTS_PER_TURN`."""
    return [listener, *(listener.dup() for _ in range(ACCEPTS_PER_TURN - 1))]


@contextmanager
def bind(hostname: str, port: int) -> Iterator[socket.socket]:
    """A bound socket that does not listen, on a port that no other router gets. Raises StartError.

    After a restart the system must bind a second socket to the port, and would do so for every
    router until one of them listens, which is when the shards are warm. So the port is claimed.
    """
    try:
        listener = bind_port(hostname, port)
    except OSError as error:
        raise _not_there(hostname, port, str(error.strerror)) from error
    with listener, _claim(listener, hostname, port) if port else nullcontext():
        yield listener


def _claim(listener: socket.socket, hostname: str, port: int) -> socket.socket:
    try:
        return claim_port("text-generation-router", listener)
    except NameHeldError as error:
        why = f"another router is starting there, or some program holds the name @{error.name}"
        raise _not_there(hostname, port, why) from error


def _not_there(hostname: str, port: int, why: str) -> StartError:
    return StartError(
        f"Can not listen on {hostname} port {port}: {why}; choose another with "
        "--port, --prometheus-port or --hostname"
    )
