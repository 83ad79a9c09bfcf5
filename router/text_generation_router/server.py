"""The HTTP server around the application: its ports, its certificate and its shutdown."""

import asyncio
import logging
import os
import signal
import socket
import ssl
import types
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import uvicorn
from starlette.types import ASGIApp
from text_generation_process.sockets import bind_port

from text_generation_router.config import RouterConfig
from text_generation_router.edge.connection import Connection, ConnectionLimits, Connections
from text_generation_router.edge.front import Front
from text_generation_router.metrics import Metrics
from text_generation_router.services import Services, StartError
from text_generation_router.state import ServerState, State

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


class CertificateError(ValueError):
    """The files hold no certificate with its key; one sentence says why."""


class Certificate:
    """Owns the context of all connections. New ones use what the files hold now, if that is a
    certificate with its key.

    Raises CertificateError.
    """

    def __init__(self, certfile: str, keyfile: str) -> None:
        self._files = (certfile, keyfile)
        self._seen = self._state()
        self.context = _context()
        self._load(self.context)

    @classmethod
    def of(cls, config: RouterConfig) -> "Certificate | None":
        """The certificate of the flags, if they are given. Raises CertificateError."""
        if config.ssl_certfile is None or config.ssl_keyfile is None:
            return None
        return cls(config.ssl_certfile, config.ssl_keyfile)

    def refresh(self) -> None:
        """Reads the files if they have changed. An unusable certificate is logged once."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            # Into another context first: a failure would leave half of a pair in this one.
            self._load(_context())
            self._load(self.context)
        except CertificateError as error:
            logger.error("%s; the previous certificate stays in use", error)
        else:
            logger.info("The new certificate is in use for new connections")

    def _load(self, context: ssl.SSLContext) -> None:
        """Raises CertificateError."""
        certfile, keyfile = self._files
        try:
            for path in self._files:
                # OpenSSL's error does not name the file.
                open(path, "rb").close()
            # An empty password, so that OpenSSL does not prompt for one.
            context.load_cert_chain(certfile, keyfile, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = (getattr(error, "reason", None) or str(error)).replace("_", " ").lower()
            raise CertificateError(
                f"--ssl-certfile {certfile} with --ssl-keyfile {keyfile} can not be used "
                f"({reason}); give a PEM certificate and the key it was made with, without a "
                "password"
            ) from error

    def _state(self) -> list[tuple[int, int, int]]:
        """Changes when one of the files is written or replaced; empty if one is missing."""
        with suppress(OSError):
            found = [os.stat(path) for path in self._files]
            return [(one.st_mtime_ns, one.st_size, one.st_ino) for one in found]
        return []


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class Server(uvicorn.Server):
    """Answers from the start of `serving`, with services from `open` on. It serves until a signal,
    or until the shards are declared lost or the scheduler fails.

    After the first signal new requests get 503, and running requests may end while there are
    shards; the Batcher ends those that take too long. A second signal ends them at once. Each gets
    its last event.
    """

    def __init__(
        self,
        app: ASGIApp,
        front: Front,
        config: RouterConfig,
        state: ServerState,
        certificate: Certificate | None = None,
    ) -> None:
        """`app` is the front, or what is around it."""
        limits = ConnectionLimits.of(config.payload_limit)
        self._connections = Connections(limits, Metrics(1, 2).connections_refused)
        super().__init__(server_config(app, self._connections, certificate))
        self._front = front
        self._state = state
        self._services: Services | None = None
        self._patience_s = config.graceful_termination_timeout
        self._certificate = certificate
        self._is_full = False
        self.stopped_by: list[signal.Signals] = []
        """The signals that it got."""

    def open(self, app: ASGIApp, services: Services) -> None:
        """The start is over: from now on `app` answers, on top of these services."""
        self._front.app, self._services = app, services
        self._connections.refused = services.metrics.connections_refused

    @asynccontextmanager
    async def serving(self, sockets: list[socket.socket]) -> AsyncIterator[asyncio.Task[None]]:
        """Answers on these ports in the block, until the yielded task ends."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup([*multiplied(sockets[0]), *sockets[1:]])

        async def serve_until_exit() -> None:
            await self.main_loop()
            await self.shutdown()

        task = asyncio.create_task(serve_until_exit())
        try:
            yield task
        finally:
            self.should_exit = True
            await task

    @property
    def failure(self) -> str | None:
        """Why it can not serve any more, in one sentence; None while it can."""
        if self._services is None:
            return None
        watch = self._services.watch
        if watch.verdict is not None:
            return str(watch.verdict)
        return self._services.batcher.failure

    def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
        """Called for every signal; the first one stops new requests immediately."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.stopped_by.append(signal.Signals(sig))
        self._front.close()
        self._state.go(State.DRAINING)

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop now; uvicorn calls it ten times a second."""
        if self._certificate is not None and counter % CERTIFICATE_TICKS == 0:
            self._certificate.refresh()
        if counter % TICKS_PER_LOOK == 0:
            self._look_for_room()
        if self.failure is not None:
            self._state.go(State.FAILED, self.failure)
        elif self._services is not None and self._services.watch.is_down:
            self._state.go(State.DEGRADED)
        elif self._services is not None:
            self._state.go(State.READY)
        return await super().on_tick(counter) or self.failure is not None

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
        if self._services is None or self.failure is not None:
            self._patience_s = min(self._patience_s, LOST_PATIENCE_S)
        closed_at = clock() + self._patience_s * CLOSING_SHARE
        if self._services is not None:
            await self._drain(self._services, clock() + self._patience_s * RUNNING_SHARE)
            await self._services.batcher.close()
        if self.force_exit:
            # All ended requests send their last event.
            hasten_until = clock() + HASTE_S
            while self._front.num_running and clock() < hasten_until:
                await asyncio.sleep(DRAIN_POLL_S)
            # With no time left uvicorn cancels the tasks, and logs it even if there are none.
            closed_at = clock() + (0.0 if self.server_state.tasks else HASTE_S)
        # uvicorn's annotation says whole seconds, but fractions work.
        left_s = max(0.0, closed_at - clock())
        self.config.timeout_graceful_shutdown = left_s  # type: ignore[assignment]
        await super().shutdown(sockets)

    async def _drain(self, services: Services, deadline: float) -> None:
        """Waits until no request runs, or until the deadline."""
        logger.info("Stopping: waiting for %d running requests", self._front.num_running)
        while self._front.num_running and not self.force_exit:
            if services.watch.is_down:
                logger.warning("The shards are down; running requests are ended now")
                return
            if asyncio.get_running_loop().time() > deadline:
                share_s = self._patience_s * RUNNING_SHARE
                logger.warning("Requests still run after %g s and are ended now", share_s)
                return
            await asyncio.sleep(DRAIN_POLL_S)


def server_config(
    app: ASGIApp, connections: Connections, certificate: Certificate | None = None
) -> uvicorn.Config:
    """uvicorn's configuration: no access log, and only the date as a header of its own."""
    return uvicorn.Config(
        app,
        loop="none",
        http=partial(Connection, connections),  # type: ignore[arg-type]  # a factory works
        ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
        ws="none",
        # Large, because a connection that does not fit waits a second before it is tried again.
        backlog=BACKLOG,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def multiplied(listener: socket.socket) -> list[socket.socket]:
    """Several listeners on one port, see `ACCEPTS_PER_TURN`."""
    return [listener, *(listener.dup() for _ in range(ACCEPTS_PER_TURN - 1))]


def bind(hostname: str, port: int) -> socket.socket:
    """A socket that listens. Raises StartError."""
    try:
        listener = bind_port(hostname, port)
        # The system may bind several to one port, of which only the first that listens gets it.
        listener.listen(BACKLOG)
    except OSError as error:
        raise StartError(
            f"Can not listen on {hostname} port {port}: {error.strerror}; choose another with "
            "--port, --prometheus-port or --hostname"
        ) from error
    return listener
