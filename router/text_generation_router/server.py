"""The HTTP server around the application: its ports, and its end in good order."""

import asyncio
import logging
import os
import socket
import types
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from text_generation_router.certificate import Certificate
from text_generation_router.connection import ConnectionLimits, Connections
from text_generation_router.front import Front
from text_generation_router.services import Services, StartError

# Requests may go on for this share of the graceful termination time, and are ended then, so that
# their clients can take what is left before whoever sent SIGTERM loses patience.
RUNNING_SHARE = 0.9
CLOSING_SHARE = 0.95
# How often it is looked whether the last request has ended.
DRAIN_POLL_S = 0.02
# How often it is looked whether another connection could be taken.
TICKS_PER_LOOK = 10
# An idle connection is kept for so long: longer than the pools of usual proxies and clients.
KEEP_ALIVE_S = 75
# Connections that wait to be taken; the kernel's own limit is often the same.
BACKLOG = 4096
# How many tenths of a second there are between two looks at the files of the certificate.
CERTIFICATE_TICKS = 20
# From each listener the event loop takes one connection a turn. With a single one, whoever comes
# behind 2,000 others (/health, too) waits 4 s to be heard; with so many of them, 0.3 s.
ACCEPTS_PER_TURN = 16

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Serves until it is told to stop or the shards are given up.

    From the signal on new requests are answered 503, while those that run may end; a second signal
    ends them at once. Late ones are ended by the Batcher, before the patience is over.
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
        self._is_full = False
        self._certificate = certificate

    def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
        """Called for every signal; the first one closes the door, before anything else is done."""
        self.force_exit = self.should_exit
        self._front.close()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens. Raises StartError if another program does so, since the port was taken."""
        assert sockets is not None
        listeners = [*multiplied(sockets[0]), *sockets[1:]]
        try:
            await super().startup(listeners)
        except OSError as error:
            for listener in listeners:
                listener.close()
            await self.lifespan.shutdown()
            raise StartError(
                f"Can not listen any more: {error.strerror}; another program has taken the port "
                "while the model was loaded"
            ) from error

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop now; asked ten times a second."""
        if counter % TICKS_PER_LOOK == 0:
            self._look_for_room()
        if self._certificate is not None and counter % CERTIFICATE_TICKS == 0:
            self._certificate.refresh()
        return await super().on_tick(counter) or self._services.watch.verdict is not None

    def _look_for_room(self) -> None:
        """Says so, once, when no connection can be taken any more: libuv does not. It closes those
        that come, and takes others as soon as one has ended."""
        try:
            os.close(os.dup(1))
        except OSError as error:
            if not self._is_full:
                logger.warning(
                    "No connection can be taken: %s; raise the number of files that this process "
                    "may open (ulimit -Hn), or lower --max-concurrent-requests",
                    error.strerror,
                )
            self._is_full = True
        else:
            self._is_full = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns when the last answer has been given and the last connection is closed."""
        self._front.close()
        clock = asyncio.get_running_loop().time
        closed_at = clock() + self._patience_s * CLOSING_SHARE
        await self._drain(clock() + self._patience_s * RUNNING_SHARE)
        await self._services.batcher.close()
        # Whole seconds in uvicorn's own annotations, but it waits for fractions as well.
        left_s = 0.0 if self.force_exit else max(0.0, closed_at - clock())
        self.config.timeout_graceful_shutdown = left_s  # type: ignore[assignment]
        await super().shutdown(sockets)

    async def _drain(self, deadline: float) -> None:
        """Waits until nothing runs, or as long as it may."""
        logger.info("Stopping: %d requests run and may end", self._front.num_running)
        while self._front.num_running and not self.force_exit:
            if asyncio.get_running_loop().time() > deadline:
                share_s = self._patience_s * RUNNING_SHARE
                logger.warning("Requests still run after %g s; they are ended now", share_s)
                return
            await asyncio.sleep(DRAIN_POLL_S)


def server_config(
    front: Front,
    services: Services,
    limits: ConnectionLimits | None = None,
    certificate: Certificate | None = None,
) -> uvicorn.Config:
    """How uvicorn runs the app: no access log, no headers of its own but the date."""
    limits = limits or ConnectionLimits.of(services.config.payload_limit)
    connections = Connections(limits, services.metrics.connections_refused)
    return uvicorn.Config(
        front,
        loop="none",
        http=connections.protocol,
        ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
        ws="none",
        # As many as may come at once; what the queue can not take waits a second for another try.
        backlog=BACKLOG,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def multiplied(listener: socket.socket) -> list[socket.socket]:
    """The same port several times, see `ACCEPTS_PER_TURN`."""
    return [listener, *(listener.dup() for _ in range(ACCEPTS_PER_TURN - 1))]


@contextmanager
def bind(hostname: str, port: int) -> Iterator[socket.socket]:
    """A socket that no other router gets and that does not listen yet. Raises StartError.

    The system lets two sockets have one port (after a restart they must), until one of them
    listens, which is when the shards are warm. So there is a name beside it that only one can have.
    """
    with _socket(hostname, port) as listener, socket.socket(socket.AF_UNIX) as claim:
        if port:
            name = f"text-generation-router:{listener.getsockname()[0]}:{port}"
            try:
                claim.bind(f"\0{name}")
            except OSError as error:
                why = f"another router is starting there, or some program holds the name @{name}"
                raise _not_there(hostname, port, why) from error
        yield listener


def _socket(hostname: str, port: int) -> socket.socket:
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
        raise _not_there(hostname, port, str(error.strerror)) from error
    return listener


def _not_there(hostname: str, port: int, why: str) -> StartError:
    return StartError(
        f"Can not listen on {hostname} port {port}: {why}; choose another with "
        "--port, --prometheus-port or --hostname"
    )
