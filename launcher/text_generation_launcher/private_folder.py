"""A folder for the shards' sockets that no other user of the machine can enter."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PREFIX = "pytgi-sockets-"
# Another launcher that clears up can take a folder for a dead one's, in the moment before it is
# locked.
_TRIES = 5


class PrivateFolder:
    """Owns a fresh folder of mode 0700, until closed or until this process dies.

    It is locked: one that is not was left by a launcher that was killed, and is removed by the next
    one of the same user that looks there.
    """

    def __init__(self, parent: Path) -> None:
        """Raises OSError if there can be none in `parent`."""
        _remove_dead(parent)
        for _ in range(_TRIES):
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            descriptor = _lock(self.path)
            if descriptor is not None:
                self._descriptor = descriptor
                return
        raise OSError(0, "every folder that was made there vanished")

    def close(self) -> None:
        """Removes it with the sockets in it."""
        _remove(self.path, self._descriptor)
        os.close(self._descriptor)


def is_private(folder: Path) -> bool:
    """Whether it is ours and nobody else may look into it, as the folder of a session should be."""
    try:
        state = folder.lstat()
    except OSError:
        return False
    is_closed = stat.S_ISDIR(state.st_mode) and not state.st_mode & 0o077
    return is_closed and state.st_uid == os.geteuid()


def make_in_one_of(candidates: Sequence[Path], longest: int) -> tuple[PrivateFolder | None, str]:
    """A folder in the first of `candidates` that takes one whose path has at most `longest` bytes;
    else None, and why each of them did not."""
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
    """A descriptor that holds the folder, if it is there, ours, and nobody else's."""
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError:
        return None
    with suppress(OSError):  # held by its launcher, or removed meanwhile
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there, locked = path.lstat(), os.fstat(descriptor)
        if os.path.samestat(there, locked) and locked.st_uid == os.geteuid():
            return descriptor
    os.close(descriptor)
    return None


def _remove(path: Path, descriptor: int) -> None:
    """What can not be removed stays: somebody has put it there."""
    with suppress(OSError):
        for name in os.listdir(descriptor):
            os.unlink(name, dir_fd=descriptor)
        path.rmdir()
