"""The state of the server, in one word, and the socket over which the launcher and the router tell
each other theirs. Probes answer it without asking another process."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from enum import Enum

import orjson

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
"""Interval of `alive`. One may be missing: the event loop is busy, or the socket full. Several
missing ones mean that the loop hangs."""
# Of one message, as the launcher reads it.
_MOST_BYTES = 4096
# Of a reason: JSON takes up to 6 bytes for each.
_MOST_CHARACTERS = _MOST_BYTES // 8


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


class LauncherLink:
    """Owns this end of the socket, from `begin` to `close`; never waits for the launcher.

    Sends one JSON object per message: `{"event": "alive"}` each second, and
    `{"event": "lost", "why": "…"}` each time shards are declared lost. While the socket is full,
    `alive` is dropped; `lost` is sent as soon as there is room. Notes each message of the launcher
    in the state.
    """

    def __init__(self, descriptor: int | None, state: ServerState) -> None:
        """None: there is no launcher, and it does nothing. Raises ValueError if the descriptor is
        not open."""
        self._descriptor = descriptor
        self._state = state
        # The message about a loss that is not sent yet.
        self._lost = b""
        if descriptor is None:
            return
        try:
            os.set_blocking(descriptor, False)
            os.set_inheritable(descriptor, False)
        except OSError as error:
            raise ValueError(
                f"`--launcher-fd` must be the end of an open socket: {descriptor} is not "
                f"({error.strerror}); leave it out if no launcher has opened one"
            ) from error

    def begin(self) -> None:
        """Beats and reads from now on. Called in the event loop."""
        if self._descriptor is not None:
            asyncio.get_running_loop().add_reader(self._descriptor, self._read)
            self._beat()

    def close(self) -> None:
        """Closes the socket; may be repeated. Called in the event loop."""
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def lost(self, why: str) -> None:
        """Reports that the shards are lost. It may be repeated for later shards."""
        self._lost = orjson.dumps({"event": "lost", "why": why[:_MOST_CHARACTERS]})
        self._report_loss()

    def _beat(self) -> None:
        if self._descriptor is not None:
            self._report_loss()
            self._write(b'{"event":"alive"}')
            asyncio.get_running_loop().call_later(PERIOD_S, self._beat)

    def _report_loss(self) -> None:
        if self._lost and self._write(self._lost):
            self._lost = b""

    def _write(self, message: bytes) -> bool:
        """Whether it was sent."""
        if self._descriptor is None:
            return False
        try:
            os.write(self._descriptor, message)
        except BlockingIOError:
            return False
        except OSError:
            self._end()
            return False
        return True

    def _read(self) -> None:
        assert self._descriptor is not None
        try:
            message = os.read(self._descriptor, _MOST_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            message = b""
        if message:
            self._state.note_progress(message.decode(errors="replace").strip())
        else:
            self._end()

    def _end(self) -> None:
        """The launcher has ended, and this process ends with it."""
        logger.warning("The launcher has closed its end of --launcher-fd")
        self.close()
