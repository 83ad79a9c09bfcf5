"""The directory of Triton's compilation cache."""

import logging
import os
import tempfile
from pathlib import Path

from text_generation_shard.trusted_folders import temporary_folder, why_untrusted

logger = logging.getLogger(__name__)


def choose_directory() -> None:
    """Set TRITON_CACHE_DIR: the user's value, else the home directory. If that is not writable, or
    other users can write to it, a temporary folder: Triton runs the code it reads there. Raises
    OSError with a sentence if no folder is writable."""
    path = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache"))
    if reason := _why_unusable(path):
        other = temporary_folder("pytgi-triton")
        logger.warning("compiled kernels are not cached in %s but in %s: %s", path, other, reason)
        path = other
    os.environ["TRITON_CACHE_DIR"] = str(path)


def _why_unusable(path: Path) -> str:
    if path.parts[0] == "~":
        return "this user has no home directory"
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        return error.strerror or str(error)
    return why_untrusted(path)
