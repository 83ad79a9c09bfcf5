"""Ports and unix sockets that a launcher holds while it runs, checked before weights are loaded."""

import errno
import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from text_generation_process.defaults import SOCKET_NAME
from text_generation_process.option import Mode
from text_generation_process.sockets import (
    MAX_PATH_BYTES,
    AddressError,
    bind_port,
    check_length,
    check_owner,
    in_use,
    remove_stale,
)

from text_generation_launcher.config import LauncherConfig

PREFIX = "pytgi-sockets-"
_FLAG = "--shard-uds-path"


class Addresses:
    """Owns ports and sockets until closed, also while the processes that use them are replaced."""

    def __init__(self, config: LauncherConfig) -> None:
        """Raises AddressError for an address that can not be used, and then holds none."""
        with ExitStack() as stack:
            port = config.port if config.mode is Mode.SERVE else None
            for flag, number in (("--port", port), ("--prometheus-port", config.prometheus_port)):
                if number is not None:
                    stack.enter_context(closing(PortClaim(config.hostname, number, flag)))
            self.rendezvous: PortClaim | None = None
            """Where several shards meet."""
            if len(config.shards) > 1:
                rendezvous = PortClaim(
                    config.master_addr, config.master_port, "--master-port", "--master-addr"
                )
                self.rendezvous = stack.enter_context(closing(rendezvous))
            prefix = config.shard_uds_path
            if prefix is None:
                folder = private_folder(config.socket_places, len(config.shards))
                stack.enter_context(closing(folder))
                prefix = str(folder.path / SOCKET_NAME)
            sockets = SocketClaim(prefix, len(config.shards))
            self.sockets = stack.enter_context(closing(sockets))
            """Where shards listen."""
            self.close = stack.pop_all().close
            """Releases them."""


class PortClaim:
    """Holds a port for the processes of this launcher alone, until closed.

    It is bound and does not listen: the system gives it to no process that asks for any free port,
    and a child can still listen on it, with SO_REUSEADDR. Until then the system would give it to
    several launchers. An abstract unix socket, which has no file and ends with its process,
    excludes them.
    """

    def __init__(
        self, hostname: str, port: int | None, flag: str, address_flag: str = "--hostname"
    ) -> None:
        """None: any free port. Raises AddressError, naming the flags that would help."""
        try:
            # Shards that meet use an address of version 4 where a name has both.
            prefers_ipv4 = address_flag == "--master-addr"
            self._held = bind_port(hostname, port or 0, prefers_ipv4)
        except socket.gaierror:
            everywhere = ", 0.0.0.0 for all" if address_flag == "--hostname" else ""
            raise AddressError(
                f"{hostname} is not an address of this machine: give {address_flag} an IP address"
                f"{everywhere}"
            ) from None
        except OSError as error:
            why = {
                errno.EADDRINUSE: f"port {port} on {hostname} is already in use: choose another "
                f"with {flag}",
                errno.EACCES: f"port {port} needs privileges: choose one above 1023 with {flag}",
                errno.EADDRNOTAVAIL: f"{hostname} is not an address of this machine: choose "
                f"another with {address_flag}",
            }
            other = f"cannot listen on {hostname} port {port}: {error.strerror}"
            raise AddressError(why.get(error.errno or 0, other)) from error
        address, self.number = self._held.getsockname()[:2]
        """The port."""
        name = f"text-generation-launcher:{address}:{self.number}"
        self._claim = socket.socket(socket.AF_UNIX)
        try:
            self._claim.bind(f"\0{name}")
        except OSError as error:
            self.close()
            raise AddressError(
                f"port {self.number} on {hostname} is already in use: another launcher that is "
                f"starting, or some program of this machine, holds the socket name @{name}: "
                f"choose another port with {flag}"
            ) from error

    def close(self) -> None:
        """Releases the port."""
        self._claim.close()
        self._held.close()


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
        check_length(max(self.paths, key=len), _FLAG)
        if danger := _danger_in(Path(prefix).absolute().parent):
            raise AddressError(f"{danger} or choose another place with {_FLAG}")
        path, flags = f"{prefix}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with ExitStack() as stack:
            try:
                lock = os.open(path, flags, 0o600)
            except OSError as error:
                check_owner(path, _FLAG)
                raise AddressError(
                    f"cannot write {path}: {error.strerror}: choose a place that can be written "
                    f"with {_FLAG}"
                ) from error
            stack.callback(os.close, lock)
            check_owner(path, _FLAG)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise in_use(prefix, _FLAG) from None
            for path in self.paths:
                remove_stale(path, _FLAG)
            self._lock = stack.pop_all()

    def remove_sockets(self) -> None:
        """Removes the sockets that killed shards left."""
        for path in self.paths:
            with suppress(OSError):  # the shard removed it
                os.unlink(path)

    def close(self) -> None:
        """Removes remaining sockets, and releases the prefix."""
        self.remove_sockets()
        self._lock.close()


def _danger_in(folder: Path) -> str:
    """How another user could replace a socket in `folder`, and what helps; empty: not at all. In
    /tmp not, by its sticky bit: users remove only their own files."""
    try:
        state = folder.stat()
    except OSError:
        return ""  # the first write there reports the reason
    if state.st_uid not in (0, os.geteuid()):
        return (
            f"{folder} belongs to user {state.st_uid}, who could replace the shards' sockets in "
            f"it, and this launcher runs as user {os.geteuid()}: `chown` it"
        )
    # A group with the number of the user has this user only.
    is_own_group = state.st_gid == os.geteuid() != 0
    others = state.st_mode & (0o002 if is_own_group else 0o022)
    if others and not state.st_mode & stat.S_ISVTX:
        return (
            f"other users can replace the shards' sockets in {folder} (mode "
            f"{stat.S_IMODE(state.st_mode):04o}): `chmod go-w` it"
        )
    return ""


class PrivateFolder:
    """Owns a fresh folder of mode 0700, until closed or until this process dies.

    The folder is locked. One with files and without a lock was left by a killed launcher; the next
    launcher of the same user removes it.
    """

    def __init__(self, parent: Path) -> None:
        """Raises OSError if no folder can be made in `parent`."""
        for path in parent.glob(f"{PREFIX}*"):
            # Another user's, locked, or removed already; an empty one may just have been made.
            with suppress(OSError), _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
                if path.stat().st_uid == os.geteuid() and os.listdir(path):
                    _remove(path)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # Waits for another launcher that looks whether it is dead.
        self._lock = _locked(self.path, fcntl.LOCK_EX)

    def close(self) -> None:
        """Removes the folder and its sockets."""
        _remove(self.path)
        self._lock.close()


def _locked(path: Path, operation: int) -> ExitStack:
    """Holds the lock of a folder until it is closed. Raises OSError."""
    with ExitStack() as stack:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        stack.callback(os.close, folder := os.open(path, flags))
        fcntl.flock(folder, operation)
        return stack.pop_all()


def _remove(path: Path) -> None:
    """Removes the sockets and the folder, except what this user can not remove."""
    with suppress(OSError):
        for name in os.listdir(path):
            os.unlink(path / name)
        path.rmdir()


def private_folder(places: Sequence[Path], world_size: int = 1) -> PrivateFolder:
    """A folder for sockets if --shard-uds-path is not given: in the first of the places where no
    other user could replace it. Raises AddressError."""
    reasons = []
    longest = MAX_PATH_BYTES - len(f"/{SOCKET_NAME}-{world_size - 1}")
    for parent in dict.fromkeys(place.absolute() for place in places):
        if danger := _danger_in(parent):
            reasons.append(danger)
            continue
        try:
            folder = PrivateFolder(parent)
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
            continue
        if len(os.fsencode(folder.path)) <= longest:
            return folder
        folder.close()
        reasons.append(f"{parent}: the path is too long for a unix socket")
    raise AddressError(
        f"there is no place for the shards' sockets ({', '.join(reasons)}): set TMPDIR to a folder "
        f"that can be written, or choose a place with {_FLAG}"
    )
