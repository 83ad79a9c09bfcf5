"""Where compiled kernels are kept between starts."""

import hashlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

from numba.core import config

logger = logging.getLogger(__name__)


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
