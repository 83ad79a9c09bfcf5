"""TCP ports, and paths of unix sockets, before a process listens on them."""

import errno
import os
import socket
import stat

MAX_PATH_BYTES = 107
"""`sun_path` of Linux has 108 bytes, one of which ends the string."""


class AddressError(ValueError):
    """An address that can't be used, in one sentence."""


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


def check_length(path: str, flag: str) -> None:
    """Raises AddressError, naming the flag that would help, as all below do."""
    if (length := len(os.fsencode(path))) > MAX_PATH_BYTES:
        raise AddressError(
            f"{path} takes {length} bytes, and a unix socket path has at most {MAX_PATH_BYTES}: "
            f"choose a shorter {flag}"
        )


def check_owner(path: str, flag: str) -> None:
    """A file of another user is never used, root's neither."""
    if os.path.lexists(path) and (owner := os.lstat(path).st_uid) != os.geteuid():
        raise AddressError(
            f"{path} belongs to user {owner}, and this process runs as user {os.geteuid()}: "
            f"choose another place with {flag}, or have it removed"
        )


def in_use(prefix: str, flag: str) -> AddressError:
    """The sentence for sockets of a server that runs."""
    return AddressError(
        f"another server uses the shard sockets {prefix}-*: stop it or choose another place with "
        f"{flag}"
    )


def remove_stale(path: str, flag: str) -> None:
    """Removes the socket that a killed server left; anything else is an error."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise AddressError(
            f"{path} exists and is not a socket: move it away or choose another place with {flag}"
        )
    check_owner(path, flag)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        # A server that is busy or stopped answers otherwise.
        if probe.connect_ex(path) not in (errno.ECONNREFUSED, errno.ENOENT):
            raise in_use(path.rsplit("-", 1)[0], flag)
    try:
        os.unlink(path)
    except OSError as error:
        raise AddressError(
            f"cannot remove {path}, which a server left: {error.strerror}: remove it or choose "
            f"another place with {flag}"
        ) from error
