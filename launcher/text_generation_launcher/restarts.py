"""Shards and router that end while they serve are started again: when, and when not."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from text_generation_launcher.failures import ChildDied
from text_generation_launcher.log import Log

LIMIT = 5
"""Maximum restarts of one part within WINDOW_S."""
WINDOW_S = 600.0
FIRST_DELAY_S = 0.5
"""Delay of the second restart in a row. The first has none, each further one the double."""
LONGEST_DELAY_S = 8.0
IN_A_ROW_S = 60.0
"""Two ends within this time may have the same cause."""
PROBE_PERIOD_S = 0.25
"""Time between two probes of replaced processes."""
LEAST_PATIENCE_S = 60.0
"""Replaced processes must serve within this time, or within PATIENCE times the first start."""
PATIENCE = 10


@dataclass(slots=True)
class Part:
    """Processes that are replaced together: all shards, or the router. Owns when they ended. Times
    are seconds of a monotonic clock."""

    name: str
    """With its verb: `shard 0 is`."""
    has_ended: Callable[[], bool]
    """Whether one of its processes has ended; False while it has no processes."""
    end: Callable[[], None]
    """Ends its remaining processes."""
    start: Callable[[int], None]
    """Starts its processes; gets the number of replacements."""
    ends: deque[float] = field(default_factory=deque)
    """Within the window."""
    total: int = 0
    """Restarts since the start."""
    due: float | None = None
    """When it is started; None: it has been started."""

    def delay_after_end(self, now: float) -> float | None:
        """Seconds until the restart after an end at `now`; None after too many ends."""
        while self.ends and self.ends[0] <= now - WINDOW_S:
            self.ends.popleft()
        if len(self.ends) == LIMIT:
            return None
        in_a_row = sum(end > now - IN_A_ROW_S for end in self.ends)
        self.ends.append(now)
        self.total += 1
        return min(FIRST_DELAY_S * 2 ** (in_a_row - 1), LONGEST_DELAY_S) if in_a_row else 0.0


class Restarts:
    """Owns when each part is started again. Times are seconds of a monotonic clock."""

    def __init__(
        self,
        parts: tuple[Part, ...],
        is_ready: Callable[[], bool],
        log: Log,
        first_start_s: float = 0.0,
    ) -> None:
        """`is_ready`: whether all parts serve; `first_start_s`: duration of the first start."""
        self._parts = parts
        self._is_ready = is_ready
        self._log = log
        self.is_whole = True
        """Whether all parts have been started and found ready."""
        self._broken_at = 0.0
        self._probe_at = 0.0
        self.patience_s = max(LEAST_PATIENCE_S, PATIENCE * first_start_s)
        """How long replaced processes may take until all parts serve."""
        self._late_at = math.inf

    def take_away(self, died: ChildDied, now: float) -> None:
        """Ends the parts of which a child has ended, and schedules their start. Raises `died` after
        too many restarts."""
        ended = [part for part in self._parts if part.has_ended()]
        delays = [part.delay_after_end(now) for part in ended]
        window = f"{WINDOW_S / 60:g} minutes"
        if None in delays:
            name = ended[delays.index(None)].name
            self._log.info(f"{name} not replaced again: the limit is {LIMIT} times in {window}")
            raise died
        self._log.error(str(died))
        if self.is_whole:
            self.is_whole, self._broken_at = False, now
        for part, delay_s in zip(ended, delays, strict=True):
            part.end()
            part.due = now + (delay_s or 0.0)
            later = f", in {delay_s:g} s" if delay_s else ""
            count = f"{len(part.ends)} of {LIMIT} in {window}"
            self._log.info(f"{part.name} replaced ({count}){later}")

    @property
    def _is_all_started(self) -> bool:
        return all(part.due is None for part in self._parts)

    def is_late(self, now: float) -> bool:
        """Whether all parts have been started, and do not serve in time."""
        return not self.is_whole and self._is_all_started and now > self._late_at

    def bring_back(self, now: float) -> None:
        """Starts the parts that are due; logs when all of them are ready again."""
        for part in self._parts:
            if part.due is not None and now >= part.due:
                part.due = None
                self._late_at = now + self.patience_s
                part.start(part.total)
        if self.is_whole or not self._is_all_started or now < self._probe_at:
            return
        self._probe_at = now + PROBE_PERIOD_S
        if self._is_ready():
            self.is_whole = True
            self._log.info(f"Ready again after {now - self._broken_at:.1f} s")
