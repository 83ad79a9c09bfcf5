"""The unix sockets of the shards, and all addresses that one launcher holds while it runs."""

import fcntl
import os
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
    check_length,
    check_owner,
    in_use,
    remove_stale,
)

from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.ports import PortClaim

PREFIX = "pytgi-sockets-"
_FLAG = "--shard-uds-path"


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
        with ExitStack() as stack:
            stack.callback(os.close, _lock_file(prefix))
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


def _lock_file(prefix: str) -> int:
    """The descriptor of a lock. Raises AddressError."""
    path = f"{prefix}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        check_owner(path, _FLAG)
        raise AddressError(
            f"cannot write {path}: {error.strerror}: choose a place that can be written with "
            "--shard-uds-path"
        ) from error
    try:
        check_owner(path, _FLAG)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (AddressError, OSError) as error:
        os.close(descriptor)
        raise error if isinstance(error, AddressError) else in_use(prefix, _FLAG) from None
    return descriptor


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
            with suppress(OSError):  # another user's, locked, or removed already
                _remove_dead(path)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._descriptor = _open_folder(self.path)
        # Waits for another launcher that looks whether it is dead.
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def close(self) -> None:
        """Removes the folder and its sockets."""
        _remove(self.path, self._descriptor)
        os.close(self._descriptor)


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_dead(path: Path) -> None:
    """Removes a folder that a killed launcher left. An empty one may just have been made. Raises
    OSError."""
    descriptor = _open_folder(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_uid == os.geteuid() and os.listdir(descriptor):
            _remove(path, descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path, descriptor: int) -> None:
    """Removes the sockets and the folder, except what this user can not remove."""
    with suppress(OSError):
        for name in os.listdir(descriptor):
            os.unlink(name, dir_fd=descriptor)
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
        "that can be written, or choose a place with --shard-uds-path"
    )


class Addresses:
    """Owns ports and sockets until closed, also while the processes that use them are replaced."""

    def __init__(self, config: LauncherConfig) -> None:
        """Raises AddressError for an address that can not be used, and then holds none."""
        with ExitStack() as stack:
            if config.mode is Mode.SERVE:
                stack.enter_context(closing(PortClaim(config.hostname, config.port, "--port")))
            if config.prometheus_port is not None:
                port, flag = config.prometheus_port, "--prometheus-port"
                stack.enter_context(closing(PortClaim(config.hostname, port, flag)))
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
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Releases them."""
        self._stack.close()
