"""Shards and router that end while they serve are started again."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from text_generation_launcher.failures import ChildDied
from text_generation_launcher.log import Log
from text_generation_launcher.restarts import LIMIT, WINDOW_S, Restarts

PROBE_PERIOD_S = 0.25
"""Time between two probes of replaced processes."""
LEAST_PATIENCE_S = 60.0
"""Replaced processes must serve within this time, or within PATIENCE times the first start."""
PATIENCE = 10


@dataclass(slots=True)
class Part:
    """Processes that are replaced together: all shards, or the router."""

    name: str
    verb: str
    has_ended: Callable[[], bool]
    """Whether one of its processes has ended; False while it has no processes."""
    end: Callable[[], None]
    """Ends its remaining processes."""
    start: Callable[[int], None]
    """Starts its processes; gets the number of replacements."""
    restarts: Restarts = field(default_factory=Restarts)
    due: float | None = None
    """When it is started; None: it has been started."""


class Replacements:
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
        restarts = [part.restarts.after_end(now) for part in ended]
        for part, restart in zip(ended, restarts, strict=True):
            if restart is None:
                self._log.info(
                    f"{part.name} {part.verb} not replaced again: the limit is {LIMIT} times in "
                    f"{WINDOW_S / 60:g} minutes"
                )
                raise died
        self._log.error(str(died))
        if self.is_whole:
            self.is_whole, self._broken_at = False, now
        for part, restart in zip(ended, restarts, strict=True):
            assert restart is not None
            part.end()
            part.due = now + restart.delay_s
            later = f", in {restart.delay_s:g} s" if restart.delay_s else ""
            self._log.info(f"{part.name} {part.verb} replaced ({restart}){later}")

    def is_late(self, now: float) -> bool:
        """Whether all parts have been started, and do not serve in time."""
        is_all_started = all(part.due is None for part in self._parts)
        return not self.is_whole and is_all_started and now > self._late_at

    def bring_back(self, now: float) -> None:
        """Starts the parts that are due; logs when all of them are ready again."""
        for part in self._parts:
            if part.due is not None and now >= part.due:
                part.due = None
                self._late_at = now + self.patience_s
                part.start(part.restarts.total)
        is_all_started = all(part.due is None for part in self._parts)
        if self.is_whole or not is_all_started or now < self._probe_at:
            return
        self._probe_at = now + PROBE_PERIOD_S
        if self._is_ready():
            self.is_whole = True
            self._log.info(f"Ready again after {now - self._broken_at:.1f} s")
