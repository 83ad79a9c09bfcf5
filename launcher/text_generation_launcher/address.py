"""The addresses the server takes, checked before minutes are spent on weights."""

import errno
import fcntl
import os
import socket
import stat

MAX_SOCKET_PATH_BYTES = 107
"""`sun_path` of Linux holds 108 bytes, of which one ends the string."""


class AddressError(Exception):
    """An address that can't be used, in one sentence."""


def claim_port(hostname: str, port: int, flag: str) -> socket.socket:
    """Raises AddressError if the port can't be listened on; `flag` is what would change it.

    Until the socket is closed no other launcher gets the port. The port itself can't be held for
    the router: the system would let several launchers have it until one of their routers listens,
    which is when its model is loaded. A name can.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        raise AddressError(
            f"{hostname} is not an address of this machine: give --hostname an IP address, "
            "0.0.0.0 for all"
        ) from None
    with socket.socket(family, kind, protocol) as probe:
        # connections of an earlier server that are still closing don't matter
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claim = socket.socket(socket.AF_UNIX)
        try:
            probe.bind(address)
            claim.bind(f"\0text-generation-launcher:{address[0]}:{port}")
        except OSError as error:
            claim.close()
            raise AddressError(_why_not(error, hostname, port, flag)) from error
    return claim


def _why_not(error: OSError, hostname: str, port: int, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {hostname} is already in use: choose another with {flag}"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges: choose one above 1023 with {flag}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{hostname} is not an address of this machine: choose another with --hostname"
    return f"cannot listen on {hostname} port {port}: {error.strerror}"


class SocketClaim:
    """Holds the shard socket prefix for this launcher alone, until closed or until it dies.

    The lock is on the file `<prefix>.lock`, which stays: removing it would let two launchers
    hold locks on two files of the same name.
    """

    def __init__(self, prefix: str, world_size: int) -> None:
        """Raises AddressError; afterwards no socket of an earlier server is left."""
        self.paths = tuple(f"{prefix}-{rank}" for rank in range(world_size))
        length = max(len(os.fsencode(path)) for path in self.paths)
        if length > MAX_SOCKET_PATH_BYTES:
            raise AddressError(
                f"--shard-uds-path {prefix} is too long: with the shard's rank it takes {length} "
                f"bytes, and a unix socket path has at most {MAX_SOCKET_PATH_BYTES}: choose a "
                "shorter one"
            )
        self._descriptor = self._lock(prefix)
        try:
            for path in self.paths:
                self._remove_stale(path)
        except AddressError:
            os.close(self._descriptor)
            raise

    @staticmethod
    def _lock(prefix: str) -> int:
        path = f"{prefix}.lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise AddressError(
                f"cannot write {path}: {error.strerror}: choose a place that can be written with "
                "--shard-uds-path"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise AddressError(_in_use(prefix)) from None
        return descriptor

    @staticmethod
    def _remove_stale(path: str) -> None:
        try:
            is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
        except FileNotFoundError:
            return
        if not is_socket:
            raise AddressError(
                f"{path} exists and is not a socket: move it away or choose another place with "
                "--shard-uds-path"
            )
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            try:
                probe.connect(path)
            except OSError:
                os.unlink(path)  # nobody listens: it was left by a server that was killed
                return
        raise AddressError(_in_use(path.rsplit("-", 1)[0]))

    def close(self) -> None:
        """Removes the sockets that were left, and lets another launcher have the prefix."""
        for path in self.paths:
            try:
                os.unlink(path)
            except OSError:
                continue  # the shard removed it
        os.close(self._descriptor)


def _in_use(prefix: str) -> str:
    return (
        f"another server uses the shard sockets {prefix}-*: stop it or choose another place with "
        "--shard-uds-path"
    )
