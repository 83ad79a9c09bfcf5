"""When an ended process is started again, and when it is not. Pure: time is passed in."""

from collections import deque
from dataclasses import dataclass

LIMIT = 5
"""Maximum restarts of one part within WINDOW_S."""
WINDOW_S = 600.0
FIRST_DELAY_S = 0.5
"""Delay of the second restart in a row. The first has none, each further one the double."""
LONGEST_DELAY_S = 8.0
IN_A_ROW_S = 60.0
"""Two ends within this time may have the same cause."""


@dataclass(frozen=True, slots=True)
class Restart:
    """One restart."""

    number: int
    """Number within the window, starting at 1."""
    delay_s: float
    """Seconds to wait before it."""

    def __str__(self) -> str:
        return f"{self.number} of {LIMIT} in {WINDOW_S / 60:g} minutes"


class Restarts:
    """Owns the times at which one kind of process ended. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque()
        self.total = 0
        """Restarts since the start."""

    def after_end(self, now: float) -> Restart | None:
        """The restart after an end at `now`; None after too many ends."""
        while self._ends and self._ends[0] <= now - WINDOW_S:
            self._ends.popleft()
        if len(self._ends) == LIMIT:
            return None
        in_a_row = sum(end > now - IN_A_ROW_S for end in self._ends)
        delay_s = min(FIRST_DELAY_S * 2 ** (in_a_row - 1), LONGEST_DELAY_S) if in_a_row else 0.0
        self._ends.append(now)
        self.total += 1
        return Restart(len(self._ends), delay_s)
