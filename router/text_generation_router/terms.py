"""The terms of one HTTP request: its deadline and its priority."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from text_generation_router.errors import DeadlineError

# Event loops round the time of a timer to a thousandth.
_ROUNDED_S = 0.001


class Deadline:
    """When the answer to one request must have ended. Used from its event loop only.

    It has one timer at a time. Until an entry of the request is queued, the timer cancels the task
    that makes the answer (`bounds`). From then on it ends the entries (`ends`), which a stream
    still reads after that task has ended.
    """

    def __init__(self, seconds: float, source: str, arrival: float) -> None:
        """`arrival` is a time of the event loop; `source` names the header or flag that sets it."""
        self._seconds = seconds
        self._source = source
        self._at = arrival + seconds
        # The timer that cancels the task; None outside `bounds`.
        self._task_timer: asyncio.Timeout | None = None
        self._num_ends = 0

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return asyncio.get_running_loop().time() >= self._at - _ROUNDED_S

    def error(self) -> DeadlineError:
        """The error for the client."""
        return DeadlineError(self._seconds, self._source)

    @asynccontextmanager
    async def bounds(self) -> AsyncIterator[None]:
        """Ends the block, which is entered once, when the deadline passes. Raises DeadlineError."""
        timer = asyncio.timeout_at(self._at)
        try:
            async with timer:
                self._task_timer = timer
                try:
                    yield
                finally:
                    self._task_timer = None
        except TimeoutError:
            if not timer.expired():
                raise
            raise self.error() from None

    @contextmanager
    def ends(self, end: Callable[[], None]) -> Iterator[None]:
        """In the block the deadline calls `end`, and does not cancel the task."""
        loop = asyncio.get_running_loop()
        self._set_task_timer(None)
        self._num_ends += 1
        timer = loop.call_at(self._at, end)
        try:
            yield
        finally:
            timer.cancel()
            self._num_ends -= 1
            if not self._num_ends and not self.is_over:
                self._set_task_timer(self._at)

    def _set_task_timer(self, at: float | None) -> None:
        if self._task_timer is not None and not self._task_timer.expired():
            self._task_timer.reschedule(at)


@dataclass(frozen=True, slots=True)
class Terms:
    """What the headers of a request ask for."""

    deadline: Deadline | None = None
    # Higher ones come first; None: not given.
    priority: int | None = None


NO_TERMS = Terms()
