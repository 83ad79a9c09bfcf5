"""Two pipes: one tells the launcher that the event loop runs and when the shards are lost, the
other tells from the launcher what the shards do before they serve."""

import asyncio
import contextlib
import logging
import os
import select
from collections.abc import Callable

import orjson

from text_generation_router.state import ServerState

PERIOD_S = 1.0
"""Interval of `alive`. One line may be missing: the event loop is busy, or the pipe full. Several
missing lines mean that the loop hangs."""
# The longest line, in bytes, that a pipe writes atomically.
_MOST_BYTES = select.PIPE_BUF
# Read at once of the progress; also the longest line that is kept.
_MOST_READ = 1 << 16
_ALIVE = b'{"event":"alive"}\n'

logger = logging.getLogger(__name__)


class Heartbeat:
    """Owns the writing end of the pipe. Beats from `begin` to `close`; never waits for the reader.

    One JSON object per line: `{"event": "alive"}` each second, and `{"event": "lost", "why": "…"}`
    each time shards are declared lost.
    While the pipe is full, `alive` lines are dropped; `lost` is written as soon as there is room.
    Once the reading end is closed, nothing is written.
    """

    def __init__(self, descriptor: int | None) -> None:
        """None: there is no launcher, and it does nothing. Raises ValueError if the descriptor is
        not open for writing."""
        self._descriptor = descriptor
        self._lost: bytes | None = None
        self._is_reported = False
        self._timer: asyncio.TimerHandle | None = None
        _claim(descriptor, "--launcher-fd", "writing", lambda fd: os.write(fd, b""))

    def begin(self) -> None:
        """Beats from now on. Called in the event loop."""
        self._beat(asyncio.get_running_loop())

    def lost(self, why: str) -> None:
        """Reports that the shards are lost. It may be repeated for later shards."""
        self._lost, self._is_reported = _line_of_loss(why), False
        self._report_loss()

    def close(self) -> None:
        """Closes the pipe; may be repeated."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._descriptor is None:
            return
        self._report_loss()
        self._write(_ALIVE)
        self._timer = loop.call_later(PERIOD_S, self._beat, loop)

    def _report_loss(self) -> None:
        if self._lost is not None and not self._is_reported:
            self._is_reported = self._write(self._lost)

    def _write(self, line: bytes) -> bool:
        """Whether it was written."""
        if self._descriptor is None:
            return False
        try:
            os.write(self._descriptor, line)
        except BlockingIOError:
            return False
        except OSError as error:
            logger.warning("The launcher has closed its end of --launcher-fd: %s", error.strerror)
            self.close()
            return False
        return True


class Progress:
    """Owns the reading end of the pipe. Notes each line in the state, from `begin` to `close`."""

    def __init__(self, descriptor: int | None, state: ServerState) -> None:
        """None: there is no launcher, and it does nothing. Raises ValueError if the descriptor is
        not open for reading."""
        self._descriptor = descriptor
        self._state = state
        self._rest = b""
        _claim(descriptor, "--progress-fd", "reading", lambda fd: os.readv(fd, []))

    def begin(self) -> None:
        """Reads from now on. Called in the event loop."""
        if self._descriptor is not None:
            asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def close(self) -> None:
        """Closes the pipe; may be repeated. Called in the event loop."""
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _read(self) -> None:
        assert self._descriptor is not None
        try:
            data = os.read(self._descriptor, _MOST_READ)
        except BlockingIOError:
            return
        if not data:
            self.close()  # the launcher has ended, and this process ends with it
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:_MOST_READ]
        if lines:
            self._state.note_progress(lines[-1].decode(errors="replace"))


def _claim(descriptor: int | None, flag: str, use: str, probe: Callable[[int], int]) -> None:
    """Makes the descriptor this process's own. Raises ValueError if it is not open for that use."""
    if descriptor is None:
        return
    try:
        os.set_blocking(descriptor, False)
        os.set_inheritable(descriptor, False)
        probe(descriptor)
    except OSError as error:
        raise ValueError(
            f"`{flag}` must be the end of a pipe that is open for {use}: {descriptor} is not "
            f"({error.strerror}); leave it out if no launcher has opened one"
        ) from error


def _line_of_loss(why: str) -> bytes:
    """One line of at most `_MOST_BYTES`; a longer sentence is cut."""
    num_characters = len(why)
    while True:
        line = orjson.dumps({"event": "lost", "why": why[:num_characters]}) + b"\n"
        if len(line) <= _MOST_BYTES:
            return line
        num_characters //= 2
