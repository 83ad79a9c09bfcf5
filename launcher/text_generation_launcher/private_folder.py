"""A folder for the shards' sockets that no other user of the machine can enter."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PREFIX = "pytgi-sockets-"
# Another launcher may remove a new folder as stale, just before it is locked.
_TRIES = 5


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
            descriptor = _lock(self.path)
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


def make_in_one_of(candidates: Sequence[Path], longest: int) -> tuple[PrivateFolder | None, str]:
    """A folder in the first of `candidates` where its path has at most `longest` bytes; else None
    and the reasons."""
    reasons = []
    for parent in dict.fromkeys(candidate.absolute() for candidate in candidates):
        try:
            folder = PrivateFolder(parent)
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
            continue
        if len(os.fsencode(folder.path)) <= longest:
            return folder, ""
        folder.close()
        reasons.append(f"{parent}: the path is too long for a unix socket")
    return None, ", ".join(reasons)


def _remove_dead(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        descriptor = _lock(path)
        if descriptor is not None:
            _remove(path, descriptor)
            os.close(descriptor)


def _lock(path: Path) -> int | None:
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
