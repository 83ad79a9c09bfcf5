"""Requests to the server on this machine: whether it answers, and the log line with an example."""

import json
import shlex
from typing import TYPE_CHECKING

from text_generation_launcher.config import EMBEDDED_MODEL_ID, LauncherConfig

if TYPE_CHECKING:
    from http.client import HTTPConnection

TIMEOUT_S = 1.0
"""Short, because the ends of children and heartbeats are not noticed during a probe."""


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
