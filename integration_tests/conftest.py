"""Fixtures of the integration tests: shared servers, a test's own servers, the invariant."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration_tests.server import LauncherHandle, SharedServers, running

Launch = Callable[..., LauncherHandle]
Share = Callable[..., LauncherHandle]

# Room for 512 tokens: requests lose their blocks, and prompts are computed in parts.
CRAMPED = (
    *("--dtype", "float32", "--pooling", "mean", "--max-best-of", "4", "--enable-reflection"),
    *("--max-input-tokens", "160", "--max-total-tokens", "300"),
    *("--max-batch-prefill-tokens", "64", "--max-batch-total-tokens", "512"),
)
EMBEDDED = ("--max-concurrent-requests", "400")


@pytest.fixture(scope="session")
def shared_server(tiny_model_path: Path) -> Iterator[LauncherHandle]:
    """The server of most tests: the tiny Llama in float32 on the CPU, with prompts of up to 300
    tokens."""
    flags = ("--device", "cpu", "--dtype", "float32", "--max-input-tokens", "300")
    flags += ("--max-best-of", "8")
    with running(tiny_model_path, *flags) as handle:
        yield handle


@pytest.fixture
def server(shared_server: LauncherHandle) -> Iterator[LauncherHandle]:
    """The shared server; asserts afterwards that it is idle and all blocks are free."""
    yield shared_server
    shared_server.assert_idle()


@pytest.fixture(scope="session")
def shared_servers() -> Iterator[SharedServers]:
    servers = SharedServers()
    yield servers
    servers.end()


@pytest.fixture
def share(shared_servers: SharedServers) -> Iterator[Share]:
    """Gives the session's server of a model and flags; asserts afterwards that it is idle."""
    given: list[LauncherHandle] = []

    def get(model: Path | None, *flags: str) -> LauncherHandle:
        given.append(shared_servers.get(model, *flags))
        return given[-1]

    yield get
    for handle in given:
        handle.assert_idle()


@pytest.fixture
def cramped(share: Share, tiny_model_path: Path) -> LauncherHandle:
    """A server of the tiny Llama with hardly any memory."""
    return share(tiny_model_path, *CRAMPED)


@pytest.fixture
def embedded(share: Share) -> LauncherHandle:
    """The embedded model, for many requests at a time."""
    return share(None, *EMBEDDED)


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
