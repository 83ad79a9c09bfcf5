"""Fixtures of the integration tests: the shared server, servers of one's own, the invariant."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration_tests.server import LauncherHandle, running

Launch = Callable[..., LauncherHandle]


@pytest.fixture(scope="session")
def shared_server(tiny_model_path: Path) -> Iterator[LauncherHandle]:
    """The server most tests ask: the tiny Llama in float32 on the processor, with prompts of up to
    300 tokens."""
    flags = ("--device", "cpu", "--dtype", "float32", "--max-input-tokens", "300")
    with running(tiny_model_path, *flags) as handle:
        yield handle


@pytest.fixture
def server(shared_server: LauncherHandle) -> Iterator[LauncherHandle]:
    """The shared server; afterwards it must have got everything back."""
    yield shared_server
    shared_server.assert_idle()


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts launchers of a test's own and kills those that the test did not stop."""
    started: list[LauncherHandle] = []

    def start(model: Path | None, *flags: str, **environment: str) -> LauncherHandle:
        handle = LauncherHandle(model, *flags, **environment)
        started.append(handle)
        return handle

    yield start
    for handle in started:
        handle.kill()
