"""What every router test gets."""

import logging
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Puts the loggers back as they were: `configure_logs` changes them for the process."""
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    handlers, levels = root.handlers[:], (root.level, uvicorn.level)
    streams = sys.stdout, sys.stderr
    yield
    sys.stdout, sys.stderr = streams
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    uvicorn.setLevel(levels[1])
