"""Two pipes: one tells the launcher that the event loop runs and when the shards are lost, the
other tells from the launcher what the shards do before they serve."""

import asyncio
import contextlib
import logging
import os
import select

import orjson

from text_generation_router.state import ServerState

PERIOD_S = 1.0
"""Interval of `alive`. One line may be missing: the event loop is busy, or the pipe full. Several
missing lines mean that the loop hangs."""
# Of a reason: a pipe writes a line of PIPE_BUF bytes at once, and JSON takes up to 6 for each.
_MOST_CHARACTERS = select.PIPE_BUF // 8
# Read at once of the progress; also the longest line that is kept.
_MOST_READ = 1 << 16
_ALIVE = b'{"event":"alive"}\n'

logger = logging.getLogger(__name__)


class _Pipe:
    """Owns one end of a pipe."""

    def __init__(self, descriptor: int | None, flag: str) -> None:
        """None: there is no launcher, and it does nothing. Raises ValueError if the descriptor is
        not open."""
        self._descriptor = descriptor
        if descriptor is None:
            return
        try:
            os.set_blocking(descriptor, False)
            os.set_inheritable(descriptor, False)
        except OSError as error:
            raise ValueError(
                f"`{flag}` must be the end of an open pipe: {descriptor} is not "
                f"({error.strerror}); leave it out if no launcher has opened one"
            ) from error

    def close(self) -> None:
        """Closes the pipe; may be repeated."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


class Heartbeat(_Pipe):
    """Owns the writing end of the pipe. Beats from `begin` to `close`; never waits for the reader.

    One JSON object per line: `{"event": "alive"}` each second, and `{"event": "lost", "why": "…"}`
    each time shards are declared lost.
    While the pipe is full, `alive` lines are dropped; `lost` is written as soon as there is room.
    Once the reading end is closed, nothing is written.
    """

    def __init__(self, descriptor: int | None) -> None:
        super().__init__(descriptor, "--launcher-fd")
        # The line about a loss that is not written yet.
        self._lost = b""

    def begin(self) -> None:
        """Beats from now on. Called in the event loop."""
        if self._descriptor is not None:
            self._report_loss()
            self._write(_ALIVE)
            asyncio.get_running_loop().call_later(PERIOD_S, self.begin)

    def lost(self, why: str) -> None:
        """Reports that the shards are lost. It may be repeated for later shards."""
        event = {"event": "lost", "why": why[:_MOST_CHARACTERS]}
        self._lost = orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE)
        self._report_loss()

    def _report_loss(self) -> None:
        if self._lost and self._write(self._lost):
            self._lost = b""

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


class Progress(_Pipe):
    """Owns the reading end of the pipe. Notes each line in the state, from `begin` to `close`."""

    def __init__(self, descriptor: int | None, state: ServerState) -> None:
        super().__init__(descriptor, "--progress-fd")
        self._state = state
        self._rest = b""

    def begin(self) -> None:
        """Reads from now on. Called in the event loop."""
        if self._descriptor is not None:
            asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def close(self) -> None:
        """Closes the pipe; may be repeated. Called in the event loop."""
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
        super().close()

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
