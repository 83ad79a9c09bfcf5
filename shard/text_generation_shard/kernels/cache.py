"""Where compiled kernels are kept between starts."""

import fcntl
import hashlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numba
from llvmlite import binding
from numba.core import config

logger = logging.getLogger(__name__)

# Another server may be compiling; a little longer than that takes on a slow machine.
_PATIENCE_S = 120.0
_POLL_S = 0.1


def choose_directory() -> None:
    """Have numba keep what it compiles in a directory for exactly this version of the kernels.

    numba looks at the file of the function alone when it asks whether code is stale; ours is made
    of several. NUMBA_CACHE_DIR is where to, if it is set; else beside the source, or in the home
    directory, whichever can be written first, or else a directory of this process's own.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    for directory in _candidates():
        path = directory / f"pytgi-kernels-{digest}"
        try:
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        except OSError:
            continue
        config.CACHE_DIR = str(path)
        return
    config.CACHE_DIR = tempfile.mkdtemp(prefix="pytgi-kernels-")
    logger.warning(
        "compiled kernels can not be kept for the next start; set NUMBA_CACHE_DIR to a directory "
        "that can be written"
    )


def _candidates() -> Iterator[Path]:
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR)
    yield Path(__file__).parent / "__pycache__"
    yield Path.home() / ".cache"


@contextmanager
def filling(content: str) -> Iterator[bool]:
    """Around reading, or compiling, what `content` names. Whether it has to be compiled: no block
    like this has ended on such a machine. Meanwhile no other process fills the directory.

    Only an expectation: numba itself looks, and compiles what is missing.
    """
    directory = Path(config.CACHE_DIR)
    # As numba's index has it: what another version or processor compiled does not count.
    features = hashlib.sha256(binding.get_host_cpu_features().flatten().encode()).hexdigest()[:8]
    machine = f"{sys.implementation.cache_tag}-{binding.get_host_cpu_name()}-{features}"
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
