"""Fixtures of the integration tests: the shared server, a test's own servers, the invariant."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration_tests.server import LauncherHandle, running

Launch = Callable[..., LauncherHandle]


@pytest.fixture(scope="session")
def shared_server(tiny_model_path: Path) -> Iterator[LauncherHandle]:
    """The server of most tests: the tiny Llama in float32 on the CPU, with prompts of up to 300
    tokens."""
    flags = ("--device", "cpu", "--dtype", "float32", "--max-input-tokens", "300")
    with running(tiny_model_path, *flags) as handle:
        yield handle


@pytest.fixture
def server(shared_server: LauncherHandle) -> Iterator[LauncherHandle]:
    """The shared server; asserts afterwards that it is idle and all blocks are free."""
    yield shared_server
    shared_server.assert_idle()


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts a test's own launchers and kills those that the test did not stop."""
    started: list[LauncherHandle] = []

    def start(model: Path | None, *flags: str, **environment: str) -> LauncherHandle:
        handle = LauncherHandle(model, *flags, **environment)
        started.append(handle)
        return handle

    yield start
    for handle in started:
        handle.kill()
