"""The addresses of the server, checked before weights are loaded."""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from text_generation_process import ports
from text_generation_process.defaults import SOCKET_NAME
from text_generation_process.ports import bind_port

from text_generation_launcher.private_folder import PrivateFolder, is_private, make_in_one_of

MAX_SOCKET_PATH_BYTES = 107
"""`sun_path` of Linux has 108 bytes, one of which ends the string."""

_OWNER = "text-generation-launcher"
"""Of the claims with which launchers exclude each other from a port."""


class AddressError(Exception):
    """An address that can't be used, in one sentence."""


def claim_port(hostname: str, port: int, flag: str) -> socket.socket:
    """Raises AddressError if the port can't be listened on; `flag` is what would change it.

    Until the returned socket is closed, no other launcher gets the port. The port itself can't be
    held for the router: the system would give it to several launchers until one of their routers
    listens, which is when its model is loaded.
    """
    with _bind(hostname, port, flag, "--hostname") as bound:
        return _claim(bound, hostname, flag)


class MeetingPort:
    """Holds the port where shards meet for those of this launcher alone, until closed.

    It is bound and does not listen, so the system gives it to no process that asks for any free
    port. Rank 0 can still listen on it, with SO_REUSEADDR. The claim excludes other launchers.
    """

    def __init__(self, address: str, port: int | None) -> None:
        """None: any free port. Raises AddressError."""
        flag = "--master-port"
        self._held = _bind(address, port or 0, flag, "--master-addr")
        self.number: int = self._held.getsockname()[1]
        """The port."""
        try:
            self._claim = _claim(self._held, address, flag)
        except AddressError:
            self._held.close()
            raise

    def close(self) -> None:
        """Releases the port."""
        self._claim.close()
        self._held.close()


def _bind(hostname: str, port: int, flag: str, address_flag: str) -> socket.socket:
    """Raises AddressError, naming the flags that would help."""
    try:
        # Shards that meet use an address of version 4 where a name has both.
        return bind_port(hostname, port, prefers_ipv4=address_flag == "--master-addr")
    except socket.gaierror:
        everywhere = ", 0.0.0.0 for all" if address_flag == "--hostname" else ""
        raise AddressError(
            f"{hostname} is not an address of this machine: give {address_flag} an IP address"
            f"{everywhere}"
        ) from None
    except OSError as error:
        raise AddressError(_why_not(error, hostname, port, flag, address_flag)) from error


def _claim(bound: socket.socket, hostname: str, flag: str) -> socket.socket:
    try:
        return ports.claim_port(_OWNER, bound)
    except ports.NameHeldError as error:
        raise AddressError(
            f"port {bound.getsockname()[1]} on {hostname} is already in use: another launcher that "
            f"is starting, or some program of this machine, holds the socket name @{error.name}: "
            f"choose another port with {flag}"
        ) from error


def private_folder(
    runtime_folder: Path | None, others: Sequence[Path], world_size: int = 1
) -> PrivateFolder:
    """A folder for sockets if --shard-uds-path is not given. Raises AddressError."""
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
    """Holds the prefix of the shards' sockets for this launcher alone, until closed or until this
    process ends.

    The lock is on the file `<prefix>.lock`, which remains: without it two launchers could lock two
    files of the same name.
    """

    def __init__(self, prefix: str, world_size: int) -> None:
        """Removes the sockets of an earlier server. Raises AddressError."""
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
                _unlink(path)  # no process listens: a killed server left it
                return
        raise AddressError(_in_use(path.rsplit("-", 1)[0]))

    def remove_sockets(self) -> None:
        """Removes the sockets that killed shards left."""
        for path in self.paths:
            try:
                os.unlink(path)
            except OSError:
                continue  # the shard removed it

    def close(self) -> None:
        """Removes remaining sockets, and releases the prefix."""
        self.remove_sockets()
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
    """A file of another user is never used, root's neither. Raises AddressError."""
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
    """No other user may replace a socket in `folder`. In /tmp this holds by its sticky bit: users
    remove only their own files. Raises AddressError."""
    try:
        state = folder.stat()
    except OSError:
        return  # the first write there reports the reason
    instead = "or choose another place with --shard-uds-path"
    if state.st_uid not in (0, os.geteuid()):
        raise AddressError(
            f"{folder} belongs to user {state.st_uid}, who could replace the shards' sockets in "
            f"it, and this launcher runs as user {os.geteuid()}: `chown` it {instead}"
        )
    # A group with the number of the user has this user only.
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
