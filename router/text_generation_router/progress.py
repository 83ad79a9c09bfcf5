"""Reads from the launcher, over a pipe, what the shards do before they serve."""

import asyncio
import contextlib
import os

from text_generation_router.state import ServerState

_MOST_BYTES = 1 << 16


class Progress:
    """Owns the reading end of the pipe. Notes each line in the state, from `begin` to `close`."""

    def __init__(self, descriptor: int | None, state: ServerState) -> None:
        """None: there is no launcher, and it does nothing. Raises ValueError if the descriptor is
        not open for reading."""
        self._descriptor = descriptor
        self._state = state
        self._rest = b""
        if descriptor is None:
            return
        try:
            os.set_blocking(descriptor, False)
            os.set_inheritable(descriptor, False)
            os.readv(descriptor, [])
        except OSError as error:
            raise ValueError(
                f"`--progress-fd` must be the end of a pipe that is open for reading: {descriptor} "
                f"is not ({error.strerror}); leave it out if no launcher has opened one"
            ) from error

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
            data = os.read(self._descriptor, _MOST_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close()  # the launcher has ended, and this process ends with it
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:_MOST_BYTES]
        if lines:
            self._state.note_progress(lines[-1].decode(errors="replace"))
