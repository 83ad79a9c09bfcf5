"""A clock for tests of timers: sleeping takes no time, and each timer ends at its exact time."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class VirtualTime:
    """The time of a running loop, and of `time.perf_counter` and `time.monotonic`.

    It stops while any callback can run, and then jumps to the next timer. Only for tests without
    threads, processes and sockets, for which it does not wait.
    """

    def __init__(self) -> None:
        self.now = 1000.0

    def stand_still(self, seconds: float) -> None:
        """Time passes in which the loop runs nothing, as while its process is stopped."""
        self.now += seconds


@contextmanager
def virtual_time_of(loop: asyncio.AbstractEventLoop) -> Iterator[VirtualTime]:
    """The loop has this clock until the end, and must be a selector's."""
    selector: Any = loop._selector  # type: ignore[attr-defined]
    clock, select = VirtualTime(), selector.select

    def skip(timeout: float | None) -> Any:
        assert timeout is not None, "nothing can run, and no timer is set"
        clock.now += max(timeout, 0.0)
        return select(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selector, "select", skip)
        patch.setattr(loop, "time", lambda: clock.now)
        for name in ("perf_counter", "monotonic"):
            patch.setattr(time, name, lambda: clock.now)
        yield clock
