"""The addresses the server takes, checked before minutes are spent on weights."""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from text_generation_launcher.private_folder import PrivateFolder, is_private, make_in_one_of

MAX_SOCKET_PATH_BYTES = 107
"""`sun_path` of Linux holds 108 bytes, of which one ends the string."""

SOCKET_NAME = "text-generation-server"
"""What the sockets in a folder of their own are called, as those of TGI in /tmp."""

# Of the names with which launchers keep ports from each other.
_CLAIM = "text-generation-launcher"


class AddressError(Exception):
    """An address that can't be used, in one sentence."""


def claim_port(hostname: str, port: int, flag: str) -> socket.socket:
    """Raises AddressError if the port can't be listened on; `flag` is what would change it.

    Until the socket is closed no other launcher gets the port. The port itself can't be held for
    the router: the system would let several launchers have it until one of their routers listens,
    which is when its model is loaded. A name can.
    """
    probe, address = _bind(hostname, port, flag, "--hostname")
    with probe:
        return _claim_name(f"{_CLAIM}:{address}:{port}", hostname, port, flag)


class MeetingPort:
    """Holds the port where shards meet for those of this launcher alone, until closed.

    It is bound and not listened on, so that the system gives it to nobody who asks for any free
    port; rank 0 can listen on it all the same, with SO_REUSEADDR. A name keeps other launchers away
    who could do that, too.
    """

    def __init__(self, address: str, port: int | None) -> None:
        """None: one that is free. Raises AddressError."""
        flag, address_flag = "--master-port", "--master-addr"
        self._held, self._address = _bind(address, port or 0, flag, address_flag)
        self.number: int = self._held.getsockname()[1]
        """The port."""
        try:
            name = f"{_CLAIM}:{self._address}:{self.number}"
            self._claim = _claim_name(name, address, self.number, flag)
        except AddressError:
            self._held.close()
            raise

    def close(self) -> None:
        """Lets others have it."""
        self._claim.close()
        self._held.close()


def _bind(hostname: str, port: int, flag: str, address_flag: str) -> tuple[socket.socket, str]:
    """A bound socket and the address of `hostname`. Raises AddressError, naming the flags that
    would help."""
    try:
        found = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror:
        everywhere = ", 0.0.0.0 for all" if address_flag == "--hostname" else ""
        raise AddressError(
            f"{hostname} is not an address of this machine: give {address_flag} an IP address"
            f"{everywhere}"
        ) from None
    # Shards that meet take an address of version 4 where a name has both.
    prefers_4 = address_flag == "--master-addr"
    family, kind, protocol, _, address = (
        min(found, key=lambda one: one[0]) if prefers_4 else found[0]
    )
    bound = socket.socket(family, kind, protocol)
    # connections of an earlier server that are still closing don't matter
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise AddressError(_why_not(error, hostname, port, flag, address_flag)) from error
    return bound, str(address[0])


def _claim_name(name: str, hostname: str, port: int, flag: str) -> socket.socket:
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0{name}")
    except OSError as error:
        claim.close()
        raise AddressError(
            f"port {port} on {hostname} is already in use: another launcher that is starting, or "
            f"some program of this machine, holds the socket name @{name}: choose another port "
            f"with {flag}"
        ) from error
    return claim


def private_folder(
    runtime_folder: Path | None, others: Sequence[Path], world_size: int = 1
) -> PrivateFolder:
    """Where sockets go for which no place was chosen. Raises AddressError if there is none."""
    is_usable = runtime_folder is not None and is_private(runtime_folder)
    candidates = [*((runtime_folder,) if runtime_folder and is_usable else ()), *others]
    longest = MAX_SOCKET_PATH_BYTES - len(f"/{SOCKET_NAME}-{world_size - 1}")
    folder, reasons = make_in_one_of(candidates, longest)
    if folder is None:
        raise AddressError(
            f"there is no place for the shards' sockets ({reasons}): set TMPDIR to a folder that "
            "can be written, or choose a place with --shard-uds-path"
        )
    return folder


def _why_not(error: OSError, hostname: str, port: int, flag: str, address_flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {hostname} is already in use: choose another with {flag}"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges: choose one above 1023 with {flag}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{hostname} is not an address of this machine: choose another with {address_flag}"
    return f"cannot listen on {hostname} port {port}: {error.strerror}"


class SocketClaim:
    """Holds the shard socket prefix for this launcher alone, until closed or until it dies.

    The lock is on the file `<prefix>.lock`, which stays: removing it would let two launchers
    hold locks on two files of the same name.
    """

    def __init__(self, prefix: str, world_size: int) -> None:
        """Raises AddressError; afterwards no socket of an earlier server is left."""
        self.prefix = prefix
        self.paths = tuple(f"{prefix}-{rank}" for rank in range(world_size))
        length = max(len(os.fsencode(path)) for path in self.paths)
        if length > MAX_SOCKET_PATH_BYTES:
            raise AddressError(
                f"--shard-uds-path {prefix} is too long: with the shard's rank it takes {length} "
                f"bytes, and a unix socket path has at most {MAX_SOCKET_PATH_BYTES}: choose a "
                "shorter one"
            )
        _check_folder(Path(prefix).absolute().parent)
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
            _check_owner(path)
            raise AddressError(
                f"cannot write {path}: {error.strerror}: choose a place that can be written with "
                "--shard-uds-path"
            ) from error
        try:
            _check_owner(path)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except AddressError:
            os.close(descriptor)
            raise
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
        _check_owner(path)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            try:
                probe.connect(path)
            except OSError:
                _unlink(path)  # nobody listens: it was left by a server that was killed
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


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        raise AddressError(
            f"cannot remove {path}, which a server left: {error.strerror}: remove it or choose "
            "another place with --shard-uds-path"
        ) from error


def _check_owner(path: str) -> None:
    """Nothing of another user's is used, whatever it is; neither is root's."""
    try:
        owner = os.lstat(path).st_uid
    except OSError:
        return
    if owner != os.geteuid():
        raise AddressError(
            f"{path} belongs to user {owner}, and this launcher runs as user {os.geteuid()}: "
            "choose another place with --shard-uds-path, or have it removed"
        )


def _check_folder(folder: Path) -> None:
    """In it nobody else may put another socket in the place of ours. In /tmp nobody can: there
    everybody may only remove what is his."""
    try:
        state = folder.stat()
    except OSError:
        return  # it is said when something is written there
    instead = "or choose another place with --shard-uds-path"
    if state.st_uid not in (0, os.geteuid()):
        raise AddressError(
            f"{folder} belongs to user {state.st_uid}, who could replace the shards' sockets in "
            f"it, and this launcher runs as user {os.geteuid()}: `chown` it {instead}"
        )
    # A group that has the user's own number is the user's alone.
    is_own_group = state.st_gid == os.geteuid() != 0
    others = state.st_mode & (0o002 if is_own_group else 0o022)
    if others and not state.st_mode & stat.S_ISVTX:
        raise AddressError(
            f"other users can replace the shards' sockets in {folder} (mode "
            f"{stat.S_IMODE(state.st_mode):04o}): `chmod go-w` it {instead}"
        )


def _in_use(prefix: str) -> str:
    return (
        f"another server uses the shard sockets {prefix}-*: stop it or choose another place with "
        "--shard-uds-path"
    )
