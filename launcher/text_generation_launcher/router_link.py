"""How the launcher and the router hear of each other: a socket between them, GET /health, and the
log line with an example for people."""

import json
import shlex
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from text_generation_launcher.config import EMBEDDED_MODEL_ID, LauncherConfig

if TYPE_CHECKING:
    from http.client import HTTPConnection

TIMEOUT_S = 1.0
"""Of GET /health. Short, because the ends of children and heartbeats are not noticed meanwhile."""
SILENCE_S = 5.0
"""A router that sends nothing for this time after its first message does not serve clients."""
STARTING_SILENCE_S = 60.0
"""The same until it serves: a large tokenizer blocks its event loop while it is read."""
GAP_S = 3.0
"""After a longer gap between two reads this process was stopped itself: no verdict."""
MOST_BYTES = 4096
"""Of one message."""
TOLD = ("loading weights: ", "compiling the kernels ")
"""Beginnings of the log messages of shards that any client may read: they hold no paths."""


class RouterLink:
    """Owns a socket to one router, until closed. Never waits. Times are seconds of a monotonic
    clock.

    The router sends one JSON object per message: `{"event": "alive"}`, and
    `{"event": "lost", "why": "<sentence>"}` when it declares the shards lost. Any other data counts
    as alive. The launcher sends messages for people; an empty one says that nothing is known. The
    router shows the last one.
    """

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._told = ""
        self._heard_at: float | None = None
        self._looked_at: float | None = None
        self.silence_s = STARTING_SILENCE_S
        """How long the router may send nothing after its first message."""
        self._losses: list[str] = []

    @property
    def router_fd(self) -> int:
        """The end that the router inherits."""
        return self._theirs.fileno()

    def hand_over(self) -> None:
        """Closes the router's end here: from now on only the router has it."""
        self._theirs.close()

    def close(self) -> None:
        """Closes both ends."""
        self._theirs.close()
        self._ours.close()

    def tell(self, message: str) -> None:
        """Sends a message, unless it is the last one again; one that has no room is dropped."""
        if message == self._told:
            return
        # An empty packet would look like the end.
        data = f"{message}\n".encode()[:MOST_BYTES]
        # The router does not read, or has ended, which is noticed elsewhere.
        with suppress(OSError):
            self._ours.send(data)
            self._told = message

    def note_serving(self) -> None:
        """The router answers clients from now on."""
        self.silence_s = SILENCE_S

    def is_silent(self, now: float) -> bool:
        """Reads the messages; whether there were none for too long. False before the router's first
        message."""
        has_data = False
        with suppress(OSError):  # there is no other message, or no router
            while data := self._ours.recv(MOST_BYTES):
                has_data = True
                self._losses += _losses(data)
        is_gap = self._looked_at is not None and now - self._looked_at > GAP_S
        self._looked_at = now
        if has_data or (is_gap and self._heard_at is not None):
            self._heard_at = now
        return self._heard_at is not None and now - self._heard_at > self.silence_s

    def take_losses(self) -> list[str]:
        """Reasons for which shards were declared lost since the last call."""
        losses, self._losses = self._losses, []
        return losses


def _losses(message: bytes) -> list[str]:
    """Why the shards are lost, if the message reports this."""
    with suppress(ValueError):
        record = json.loads(message)
        if isinstance(record, dict) and record.get("event") == "lost":
            return [str(record.get("why", "the router gave no reason"))]
    return []


def is_healthy(config: LauncherConfig) -> bool:
    """Whether GET /health is answered with 200."""
    # Imported late: the import is slow, and the children load at the same time.
    from http.client import HTTPException

    host = reachable_host(config.hostname)
    connection = connection_to(host, config.port, config.has_tls, TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False  # it does not listen yet, or does not speak HTTP
    finally:
        connection.close()


def reachable_host(hostname: str) -> str:
    """An address under which a server that listens on `hostname` answers on this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(hostname, hostname)


def connection_to(host: str, port: int, has_tls: bool, timeout_s: float) -> "HTTPConnection":
    """To a server on this machine. Its certificate has another name, so it is not verified."""
    from http.client import HTTPConnection, HTTPSConnection

    if not has_tls:
        return HTTPConnection(host, port, timeout=timeout_s)
    import ssl

    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return HTTPSConnection(host, port, timeout=timeout_s, context=context)


def how_to_ask(config: LauncherConfig) -> tuple[str, str]:
    """The server's URL, and an example command."""
    host = reachable_host(config.hostname)
    scheme = "https" if config.has_tls else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.port}"
    # The certificate has the public name of this machine.
    insecure = ["--insecure"] if config.has_tls else []
    command = ["curl", *insecure, f"{url}/generate", "-H", "Content-Type: application/json"]
    if config.has_api_key:
        command += ["-H", "Authorization: Bearer YOUR_API_KEY"]
    prompt, length = "What is deep learning?", 20
    if config.model_id == EMBEDDED_MODEL_ID:
        prompt, length = "What does textwrap.dedent do?", 100
    body = {"inputs": prompt, "parameters": {"max_new_tokens": length}}
    return url, shlex.join([*command, "-d", json.dumps(body)])
