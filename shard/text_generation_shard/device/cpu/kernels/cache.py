"""Where compiled kernels are kept between starts."""

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

from text_generation_shard.device.cpu.kernels import processor
from text_generation_shard.trusted_folders import temporary_folder, why_untrusted

logger = logging.getLogger(__name__)

# Another server may be compiling; a little longer than that takes on a slow machine.
_PATIENCE_S = 120.0
_POLL_S = 0.1
# What all kernels of one model take is a tenth of it.
_ROOM_BYTES = 16 * 2**20


def choose_directory() -> None:
    """Have numba keep what it compiles in a directory for exactly this version of the kernels.

    numba looks at the file of the function alone when it asks whether code is stale; ours is made
    of several. NUMBA_CACHE_DIR is where to, if it is set; else beside the source, or in the home
    directory, or among the temporary files, whichever can be written first, by us and nobody else:
    what is read there is run.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    asked = Path(config.CACHE_DIR) if config.CACHE_DIR else None
    for directory in _candidates():
        path = directory / f"pytgi-kernels-{digest}"
        try:
            _prepare(path)
        except _UnusableError as error:
            logger.warning("compiled kernels are not kept in %s: %s", path, error)
        except OSError as error:
            # Elsewhere than asked for nobody has promised that it can be written.
            if directory == asked:
                logger.warning("compiled kernels are not kept in %s: %s", path, error.strerror)
        else:
            config.CACHE_DIR = str(path)
            return
    config.CACHE_DIR = _fresh_directory()


class _UnusableError(Exception):
    """Why a directory that can be written is not used."""


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
    """For this process alone."""
    try:
        path = tempfile.mkdtemp(prefix="pytgi-kernels-")
    except OSError as error:
        raise OSError(
            "no folder for compiled kernels can be written: set NUMBA_CACHE_DIR, or TMPDIR, to one "
            f"that can ({error.strerror})"
        ) from error
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    logger.warning(
        "compiled kernels can not be kept for the next start; set NUMBA_CACHE_DIR to a directory "
        "that can be written"
    )
    return path


@contextmanager
def filling(content: str) -> Iterator[bool]:
    """Around reading, or compiling, what `content` names. Whether it has to be compiled: no block
    like this has ended on such a machine. Meanwhile no other process fills the directory.

    Only an expectation: numba itself looks, and compiles what is missing.
    """
    directory = Path(config.CACHE_DIR)
    # As numba's index has it: what another version or processor compiled does not count.
    target = hashlib.sha256("\0".join(processor.target()).encode()).hexdigest()[:8]
    machine = f"{sys.implementation.cache_tag}-{target}"
    filled = directory / f"filled-{numba.__version__}-{machine}-{content}"
    if filled.exists():
        yield False
        return
    with _alone(directory / "lock"):
        is_empty = not filled.exists()
        yield is_empty
        # The directory may have become one that can not be written.
        with suppress(OSError):
            filled.touch()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While no other process is here: two servers that start at the same time would compile all
    twice. Where there are no locks, or another process keeps this one for too long, it goes on."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not _is_locked(descriptor) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        yield
    finally:
        # Processes forked meanwhile hold it, too.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Whether the lock is ours, or there can be none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
