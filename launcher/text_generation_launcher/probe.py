"""Whether a server on this machine answers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from http.client import HTTPConnection


def is_healthy(hostname: str, port: int, has_tls: bool, timeout_s: float) -> bool:
    """Whether GET /health is answered with 200."""
    # Imported late: the import is slow, and the children load at the same time.
    from http.client import HTTPException

    connection = connection_to(reachable_host(hostname), port, has_tls, timeout_s)
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
