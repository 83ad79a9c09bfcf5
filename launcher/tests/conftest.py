"""What tests of processes share."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.tests.fakes import world as world

SETTLED_S = 10.0
"""Longest wait; only a failing test waits this long."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Fails if the condition doesn't become true."""
    deadline = time.monotonic() + SETTLED_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture
def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
