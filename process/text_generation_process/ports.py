"""A TCP port that one process holds before it listens."""

import socket


def bind_port(hostname: str, port: int, prefers_ipv4: bool = False) -> socket.socket:
    """A bound socket that does not listen. Port 0 means any free port.

    The system may bind several sockets to one port, until one of them listens: SO_REUSEADDR is set,
    because connections of an earlier server may still be closing. Raises OSError; of these,
    socket.gaierror for a hostname that has no address.
    """
    found = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    if prefers_ipv4:
        found.sort(key=lambda one: one[0])  # AF_INET is less than AF_INET6; sort keeps the rest
    # Without the protocol, asyncio does not set TCP_NODELAY, and every answer waits 40 ms.
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
