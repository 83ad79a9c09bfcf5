"""The socket to the launcher: it hears that the event loop runs and when the shards are lost, and
tells what the shards do before they serve."""

import asyncio
import contextlib
import logging
import os

import orjson

from text_generation_router.state import ServerState

PERIOD_S = 1.0
"""Interval of `alive`. One may be missing: the event loop is busy, or the socket full. Several
missing ones mean that the loop hangs."""
# Of one message, as the launcher reads it.
_MOST_BYTES = 4096
# Of a reason: JSON takes up to 6 bytes for each.
_MOST_CHARACTERS = _MOST_BYTES // 8

logger = logging.getLogger(__name__)


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
