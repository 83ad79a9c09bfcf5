"""Shards and router are started, and started again when they end while they serve: when, and when
not."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from text_generation_launcher.failures import ChildDied
from text_generation_launcher.log import Log
from text_generation_launcher.process import ManagedProcess

LIMIT = 5
"""Maximum restarts of one part within WINDOW_S."""
WINDOW_S = 600.0
FIRST_DELAY_S = 0.5
"""Delay of the second restart in a row. The first has none, each further one the double."""
LONGEST_DELAY_S = 8.0
IN_A_ROW_S = 60.0
"""Two ends within this time may have the same cause."""
LEAST_PATIENCE_S = 60.0
"""Replaced processes must serve within this time, or within PATIENCE times the first start."""
PATIENCE = 10


@dataclass(slots=True)
class Part:
    """Processes that are started and replaced together: all shards, or the router. Owns them, and
    when they ended. Times are seconds of a monotonic clock."""

    start: Callable[[int], list[ManagedProcess]]
    """Starts its processes; gets the number of replacements."""
    clear: Callable[[], None]
    """Removes what they leave behind."""
    children: list[ManagedProcess] = field(default_factory=list)
    """Its processes; none while it waits for its start."""
    ends: deque[float] = field(default_factory=deque)
    """Within the window."""
    total: int = 0
    """Restarts since the start."""
    due: float | None = 0.0
    """When it is started; None: it has been started."""

    @property
    def has_ended(self) -> bool:
        """Whether one of its processes has ended."""
        return not all(child.is_alive for child in self.children)

    @property
    def name(self) -> str:
        """With its verb: `shard 0 is`."""
        return "all shards are" if len(self.children) > 1 else f"{self.children[0].name} is"

    def end(self) -> None:
        """Kills its remaining processes: they may wait for one that is gone."""
        for child in self.children:
            child.kill()
        self.children = []
        self.clear()

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
    """Owns when each part is started. Times are seconds of a monotonic clock."""

    def __init__(
        self,
        parts: Sequence[Part],
        is_ready: Callable[[], bool],
        announce: Callable[[], None],
        log: Log,
        may_restart: bool,
    ) -> None:
        """`is_ready`: whether all parts serve; `announce` is called when they do for the first
        time, and from then on they are replaced if they `may_restart`."""
        self._parts = parts
        self._is_ready = is_ready
        self._announce = announce
        self._log = log
        self._may_restart = may_restart
        self.is_whole = False
        """Whether all parts have been started and found ready."""
        self.has_served = False
        """Whether they ever were."""
        self._broken_at: float | None = None
        """When the parts that are not ready began to start."""
        self.patience_s = math.inf
        """How long replaced processes may take until all parts serve."""
        self._late_at = math.inf

    def take_away(self, died: ChildDied, now: float) -> None:
        """Ends the parts of which a child has ended, and schedules their start. Raises `died` if
        they are not replaced, or after too many restarts."""
        if not (self._may_restart and self.has_served):
            raise died
        ended = [part for part in self._parts if part.has_ended]
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
            later = f", in {delay_s:g} s" if delay_s else ""
            replaced = f"{part.name} replaced ({len(part.ends)} of {LIMIT} in {window}){later}"
            part.end()
            part.due = now + (delay_s or 0.0)
            self._log.info(replaced)

    @property
    def _is_all_started(self) -> bool:
        return all(part.due is None for part in self._parts)

    def is_late(self, now: float) -> bool:
        """Whether all parts have been started, and do not serve in time."""
        return not self.is_whole and self._is_all_started and now > self._late_at

    def bring_back(self, now: float) -> None:
        """Starts the parts that are due; tells when all of them are ready."""
        if self._broken_at is None:
            self._broken_at = now
        for part in self._parts:
            if part.due is not None and now >= part.due:
                part.due = None
                self._late_at = now + self.patience_s
                part.children = part.start(part.total)
        if self.is_whole or not self._is_all_started or not self._is_ready():
            return
        taken_s = now - self._broken_at
        self.is_whole = True
        if self.has_served:
            self._log.info(f"Ready again after {taken_s:.1f} s")
            return
        self.has_served = True
        self.patience_s = max(LEAST_PATIENCE_S, PATIENCE * taken_s)
        self._announce()
