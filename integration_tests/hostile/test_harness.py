"""The honest clients notice an attack, and nothing where there is none."""

import signal

import pytest

from integration_tests.hostile.contained import MEMORY_LIMIT_BYTES, family_bytes
from integration_tests.hostile.neighbours import Seen, neighbours
from integration_tests.server import LauncherHandle, wait_until


def test_nothing_is_noticed_without_an_attack(hostile_server: LauncherHandle) -> None:
    with neighbours(hostile_server) as seen:
        hostile_server.generate("beside them", max_new_tokens=20)
    seen.assert_unharmed()
    assert seen.num_tokens > 100
    assert 10_000_000 < family_bytes(hostile_server) < MEMORY_LIMIT_BYTES


def test_a_router_that_stands_still_is_noticed(hostile_server: LauncherHandle) -> None:
    router = hostile_server.child("text-generation-router")
    with neighbours(hostile_server) as seen:
        router.send_signal(signal.SIGSTOP)
        with pytest.raises(AssertionError):
            wait_until(lambda: False, 1.0, "a second has passed")
        router.send_signal(signal.SIGCONT)
    assert seen.gap > 0.9
    with pytest.raises(AssertionError):
        seen.assert_unharmed()


def test_what_is_asserted() -> None:
    fine = {"gap_before": 0.1, "gap": 0.5, "health": 0.1, "small_request": 0.5, "num_tokens": 9}
    Seen(**fine).assert_unharmed()  # type: ignore[arg-type]
    for bad in ({"gap": 0.7}, {"health": 0.4}, {"small_request": 2.1}, {"failures": ["x"]}):
        with pytest.raises(AssertionError):
            Seen(**fine | bad).assert_unharmed()  # type: ignore[arg-type]
