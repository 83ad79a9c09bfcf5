"""The directory of compiled kernels."""

import atexit
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numba
from numba.core import config

from text_generation_shard.device.cpu.kernels import target
from text_generation_shard.trusted_folders import temporary_folder, why_untrusted

logger = logging.getLogger(__name__)

# Longest wait for another server that compiles; longer than compiling takes on a slow machine.
_PATIENCE_S = 120.0
_POLL_S = 0.1
# Free space required of a directory; the kernels of one model take much less.
_ROOM_BYTES = 16 * 2**20


def choose_directory() -> None:
    """Set numba's cache to a directory for exactly this version of the kernels.

    numba checks only a function's own file for changes, but kernels consist of several files. The
    directory is in NUMBA_CACHE_DIR if set; else beside the source, in the home directory, or in a
    temporary folder: the first that only this user can write, because code in it is executed.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    asked = Path(config.CACHE_DIR) if config.CACHE_DIR else None
    for directory in _candidates():
        path = directory / f"pytgi-kernels-{digest}"
        try:
            _prepare(path)
        except _UnusableError as error:
            logger.warning("compiled kernels are not cached in %s: %s", path, error)
        except OSError as error:
            # A warning only for the requested directory; the others may be read-only.
            if directory == asked:
                logger.warning("compiled kernels are not cached in %s: %s", path, error.strerror)
        else:
            config.CACHE_DIR = str(path)
            return
    config.CACHE_DIR = _fresh_directory()


class _UnusableError(Exception):
    """Why a writable directory is not used."""


def _candidates() -> Iterator[Path]:
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR)
    yield Path(__file__).parent / "__pycache__"
    with suppress(RuntimeError):  # a user without a home
        yield Path.home() / ".cache"
    try:
        yield temporary_folder("pytgi-kernels")
    except OSError as error:
        logger.warning("%s", error)


def _prepare(path: Path) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.mkdir(mode=0o755, exist_ok=True)
    if reason := why_untrusted(path):
        raise _UnusableError(reason)
    tempfile.TemporaryFile(dir=path).close()
    state = os.statvfs(path)
    if state.f_bavail * state.f_frsize < _ROOM_BYTES and not any(path.glob("filled-*")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fresh_directory() -> str:
    """A directory for this process only."""
    try:
        path = tempfile.mkdtemp(prefix="pytgi-kernels-")
    except OSError as error:
        raise OSError(
            "no folder for compiled kernels is writable: set NUMBA_CACHE_DIR or TMPDIR to a "
            f"writable one ({error.strerror})"
        ) from error
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    logger.warning(
        "compiled kernels can not be cached for the next start; set NUMBA_CACHE_DIR to a writable "
        "directory"
    )
    return path


@contextmanager
def filling(content: str) -> Iterator[bool]:
    """Enter before loading or compiling the kernels `content`. Yields whether they are expected to
    need compiling: no such block has ended on this kind of machine. Holds a lock, so that no other
    process fills the directory meanwhile.

    Only an expectation: numba compiles what is missing.
    """
    directory = Path(config.CACHE_DIR)
    # Like numba's index: code of another version or processor does not count.
    key = hashlib.sha256("\0".join(target()).encode()).hexdigest()[:8]
    machine = f"{sys.implementation.cache_tag}-{key}"
    filled = directory / f"filled-{numba.__version__}-{machine}-{content}"
    if filled.exists():
        yield False
        return
    with _alone(directory / "lock"):
        is_empty = not filled.exists()
        yield is_empty
        # The directory may no longer be writable.
        with suppress(OSError):
            filled.touch()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock, so that two servers that start at the same time do not both
    compile everything. Continues without it if the file system has no locks, or after
    `_PATIENCE_S`."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield
        return
    # The file system may have no locks.
    with suppress(OSError):
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_POLL_S)
    try:
        yield
    finally:
        # Forked child processes also hold the lock.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
