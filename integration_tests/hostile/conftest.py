"""Fixtures of the hostile tests."""

from collections.abc import Iterator

import pytest

from integration_tests.hostile.contained import contained
from integration_tests.server import LauncherHandle


@pytest.fixture(scope="session")
def _contained_server() -> Iterator[LauncherHandle]:
    with contained(None) as handle:
        yield handle


@pytest.fixture
def hostile_server(_contained_server: LauncherHandle) -> Iterator[LauncherHandle]:
    """The embedded model with a memory limit; asserts afterwards that the server is idle."""
    yield _contained_server
    _contained_server.assert_idle()
