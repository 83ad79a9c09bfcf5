"""The state of the server, in one word. Probes answer it without asking another process."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from enum import Enum


class State(Enum):
    """States of the server."""

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    """Its shards are lost; it waits for new ones."""
    DRAINING = "draining"
    """It is stopping: running requests may end."""
    FAILED = "failed"
    """It can not go on, and ends."""


LOADING = "loading the model"
REPLACING = "waiting for new shards"
# In these phases the launcher tells what the shards do.
_WITH_PROGRESS = {LOADING, REPLACING}

_PHASES = {
    State.READY: "serving",
    State.DEGRADED: REPLACING,
    State.DRAINING: "waiting for running requests",
}
# Allowed transitions; other ones are ignored. A failure is final.
_NEXT = {
    State.STARTING: {State.STARTING, State.READY, State.DRAINING, State.FAILED},
    State.READY: {State.DEGRADED, State.DRAINING, State.FAILED},
    State.DEGRADED: {State.DEGRADED, State.READY, State.DRAINING, State.FAILED},
    State.DRAINING: {State.FAILED},
    State.FAILED: set[State](),
}


class ServerState:
    """Owns the state, its phase (a detail in words) and the time of the last change."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.state = State.STARTING
        self.phase = "starting"
        """In words; of a failure, the reason."""
        self.progress = ""
        """What the shards do in this phase, in words; empty: nothing is known."""
        self.has_started = False
        """Whether it was ever ready."""
        self._since = clock()
        self._began = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the last change, by the monotonic clock."""
        return time.monotonic() - self._began

    def go(self, state: State, phase: str = "") -> None:
        """Changes to this state and phase (the state's own if empty), if that is allowed."""
        if state not in _NEXT[self.state]:
            return
        self.has_started |= state is State.READY
        phase = phase or _PHASES[state]
        if (state, phase) != (self.state, self.phase):
            self.state, self.phase, self.progress = state, phase, ""
            self._since, self._began = self._clock(), time.monotonic()

    def note_progress(self, progress: str) -> None:
        """What the shards do now. Ignored in other phases than loading."""
        if self.phase in _WITH_PROGRESS:
            self.progress = progress

    def as_json(self) -> dict[str, str]:
        """As a JSON object."""
        since = datetime.fromtimestamp(self._since, UTC).isoformat(timespec="milliseconds")
        return {
            "state": self.state.value,
            "phase": self.phase,
            "since": since.replace("+00:00", "Z"),
            **({"progress": self.progress} if self.progress else {}),
        }
