"""The unix sockets of the shards, and all addresses that one launcher holds while it runs."""

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

from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.ports import AddressError, RendezvousPort, claim_port

MAX_SOCKET_PATH_BYTES = 107
"""`sun_path` of Linux has 108 bytes, one of which ends the string."""
PREFIX = "pytgi-sockets-"
# Another launcher may remove a new folder as stale, just before it is locked.
_TRIES = 5


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


class PrivateFolder:
    """Owns a fresh folder of mode 0700, until closed or until this process dies.

    The folder is locked. One without a lock was left by a killed launcher; the next launcher of
    the same user removes it.
    """

    def __init__(self, parent: Path) -> None:
        """Raises OSError if no folder can be made in `parent`."""
        _remove_dead(parent)
        for _ in range(_TRIES):
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            descriptor = _lock_folder(self.path)
            if descriptor is not None:
                self._descriptor = descriptor
                return
        raise OSError(0, "each new folder there was removed at once")

    def close(self) -> None:
        """Removes the folder and its sockets."""
        _remove(self.path, self._descriptor)
        os.close(self._descriptor)


def is_private(folder: Path) -> bool:
    """Whether this user owns the folder and no other user may open it."""
    try:
        state = folder.lstat()
    except OSError:
        return False
    is_closed = stat.S_ISDIR(state.st_mode) and not state.st_mode & 0o077
    return is_closed and state.st_uid == os.geteuid()


def private_folder(
    runtime_folder: Path | None, others: Sequence[Path], world_size: int = 1
) -> PrivateFolder:
    """A folder for sockets if --shard-uds-path is not given: in the folder of the session if that
    is private, else in the first of `others` where it is possible. Raises AddressError."""
    reasons = []
    is_usable = runtime_folder is not None and is_private(runtime_folder)
    candidates = [*((runtime_folder,) if runtime_folder and is_usable else ()), *others]
    longest = MAX_SOCKET_PATH_BYTES - len(f"/{SOCKET_NAME}-{world_size - 1}")
    for parent in dict.fromkeys(candidate.absolute() for candidate in candidates):
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


def _remove_dead(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        descriptor = _lock_folder(path)
        if descriptor is not None:
            _remove(path, descriptor)
            os.close(descriptor)


def _lock_folder(path: Path) -> int | None:
    """A descriptor that locks the folder; None if it is missing, another user's, or locked."""
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError:
        return None
    with suppress(OSError):  # locked by its launcher, or already removed
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there, locked = path.lstat(), os.fstat(descriptor)
        if os.path.samestat(there, locked) and locked.st_uid == os.geteuid():
            return descriptor
    os.close(descriptor)
    return None


def _remove(path: Path, descriptor: int) -> None:
    """Removes the sockets and the folder, except what this user can not remove."""
    with suppress(OSError):
        for name in os.listdir(descriptor):
            os.unlink(name, dir_fd=descriptor)
        path.rmdir()


class Addresses:
    """Owns ports and sockets until closed, also while the processes that use them are replaced."""

    def __init__(self, config: LauncherConfig) -> None:
        """Raises AddressError for an address that can not be used, and then holds none."""
        with ExitStack() as stack:
            if config.mode is Mode.SERVE:
                stack.enter_context(claim_port(config.hostname, config.port, "--port"))
            if config.prometheus_port is not None:
                flag = "--prometheus-port"
                stack.enter_context(claim_port(config.hostname, config.prometheus_port, flag))
            self.rendezvous: RendezvousPort | None = None
            """Where several shards meet."""
            if len(config.shards) > 1:
                rendezvous = RendezvousPort(config.master_addr, config.master_port)
                self.rendezvous = stack.enter_context(closing(rendezvous))
            prefix = config.shard_uds_path
            if prefix is None:
                places = config.runtime_folder, config.temporary_folders
                folder = private_folder(*places, len(config.shards))
                stack.enter_context(closing(folder))
                prefix = str(folder.path / SOCKET_NAME)
            sockets = SocketClaim(prefix, len(config.shards))
            self.sockets = stack.enter_context(closing(sockets))
            """Where shards listen."""
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Releases them."""
        self._stack.close()
