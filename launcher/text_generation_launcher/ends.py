"""Children that end: which of several failed first, the sentences for the log, and when shards and
router are started again."""

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from text_generation_launcher.process import Log, ManagedProcess

GAVE_UP = 3
"""The exit code of a shard that ends because another shard failed."""
CAUSE_S = 0.5
"""How long after the end of one child the end of another, which caused it, may be noticed."""
FAILING_S = 5.0
"""The same where the other has logged its error and only has to end, as torch takes its time."""
POLL_S = 0.02
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


class ChildDied(Exception):
    """A child that should run has ended; the message has its name, how it ended, its last words."""

    def __init__(self, sentence: str, how: str) -> None:
        super().__init__(sentence)
        self.how = how
        """The same without the words."""


def how_it_ended(child: ManagedProcess, was_ready: bool = False, gave_up: bool = False) -> str:
    """The end of a child, without its last words. `gave_up`: because of another shard."""
    name, code = child.name, child.returncode or 0
    if gave_up:
        how = f"{name} ended because another shard failed (exit code {code})"
    elif code > 0:
        how = f"{name} failed with exit code {code}"
    elif code == 0:
        how = f"{name} ended unexpectedly with exit code 0"
    else:
        how = f"{name} was killed by signal {-code} ({signal.strsignal(-code)})"
        if code == -signal.SIGKILL:
            how += ", as the system does when memory runs out,"
    return f"{how} while serving" if was_ready else how


def with_words(how: str, words: Sequence[str]) -> str:
    """How a child ended, and its last lines or the sentences of its last errors."""
    if not words:
        return f"{how} and printed nothing"
    if len(words) == 1:
        return f"{how}: {words[0]}"
    return "\n".join([f"{how}; its last lines:", *(f"  {line}" for line in words)])


def diagnose(
    shards: Sequence[ManagedProcess],
    router: Sequence[ManagedProcess],
    wait: Callable[[float], None],
    log: Log,
    was_ready: bool,
) -> ChildDied:
    """Names the child that failed first; at least one has ended. Logs the ends of the others.

    `wait` takes seconds, and may return earlier or raise.
    """

    def gave_up(child: ManagedProcess) -> bool:
        return child in shards and len(shards) > 1 and child.returncode == GAVE_UP

    def order(child: ManagedProcess) -> int:
        """A lower one can be the cause of a higher one: killed by a signal that the launcher did
        not send, failed by itself, exit code 0, gave up; the router ends when it lost a shard."""
        if child in router:
            return 4
        code = child.returncode or 0
        return 0 if code < 0 else 2 if code == 0 else 3 if gave_up(child) else 1

    ended: list[ManagedProcess] = []
    """In the order in which they were noticed; of those noticed at once by rank."""
    began = time.monotonic()
    while True:
        children = (*shards, *router)
        ended += [child for child in children if child not in ended and not child.is_alive]
        first = min(ended, key=order)
        may_follow = first in router or (len(shards) > 1 and order(first) > 0)
        most_s = FAILING_S if any(s.is_alive and s.is_failing for s in shards) else CAUSE_S
        remaining_s = began + most_s - time.monotonic()
        if all(not shard.is_alive for shard in shards) or remaining_s <= 0 or not may_follow:
            break
        wait(min(remaining_s, POLL_S))
    words = {}
    for child in ended:
        child.drain()
        words[child] = child.last_words()  # not logged elsewhere after this
    for child in ended:
        if words[child] != words[first]:  # ranks that report the same error are logged once
            log.info(with_words(how_it_ended(child, was_ready, gave_up(child)), words[child]))
    # The cause may be a shard that is stopped, and has not ended.
    cause = describe_stopped(shards) if first in router or gave_up(first) else ""
    how = how_it_ended(first, was_ready, gave_up(first))
    return ChildDied(with_words(how, words[first]) + cause, how + cause)


def describe_stopped(children: Sequence[ManagedProcess]) -> str:
    """Which of them a signal has stopped, in parentheses; empty if none."""
    names = [child.name for child in children if child.is_stopped]
    return f" ({', '.join(names)} is stopped, as by SIGSTOP)" if names else ""


def grouped(messages: Sequence[tuple[str, str]], doing: str = "") -> str:
    """Names with their last messages, grouped by message; `doing` follows the names."""
    names: dict[str, list[str]] = {}
    for name, message in messages:
        names.setdefault(message, []).append(name)
    return "; ".join(
        f"{', '.join(group)}{doing}" + (f": {message}" if message else "")
        for message, group in names.items()
    )


@dataclass(slots=True)
class Part:
    """Processes that are started and replaced together: all shards, or the router. Owns them, and
    when they ended. Times are seconds of a monotonic clock."""

    start: Callable[[int], Iterable[ManagedProcess]]
    """Starts its processes one by one; gets the number of replacements."""
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
        ended = [part for part in self._parts if not all(child.is_alive for child in part.children)]
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
                for child in part.start(part.total):
                    part.children.append(child)  # at once: the next may fail to start
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
