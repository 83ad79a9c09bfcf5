"""The two pipes between the launcher and one router: what the router reports, what it is told."""

import json
import os
import select
from contextlib import suppress

SILENCE_S = 5.0
"""A router that sends nothing for this time after its first message does not serve clients."""
STARTING_SILENCE_S = 60.0
"""The same until it serves: a large tokenizer blocks its event loop while it is read."""
GAP_S = 3.0
"""After a longer gap between two reads this process was stopped itself: no verdict."""
MOST_BYTES = 1 << 16
"""Capacity of a pipe, and the maximum that is kept of an unfinished line."""
TOLD = ("loading weights: ", "compiling the kernels ")
"""Beginnings of the log messages of shards that any client may read: they hold no paths."""


class RouterPipes:
    """Owns both pipes, until closed. Never waits. Times are seconds of a monotonic clock.

    The router writes one JSON object per line: `{"event": "alive"}`, and
    `{"event": "lost", "why": "<sentence>"}` when it declares the shards lost. Any other data counts
    as alive. The launcher writes messages for people, one per line; an empty one says that nothing
    is known. The router shows the last one.
    """

    def __init__(self) -> None:
        self._reports, self.launcher_fd = os.pipe()
        """The end that the router inherits and writes to."""
        self.progress_fd, self._messages = os.pipe()
        """The end that the router inherits and reads."""
        os.set_blocking(self._reports, False)
        os.set_blocking(self._messages, False)
        self._inherited: tuple[int, ...] = self.descriptors
        self._told = ""
        self._rest = b""
        self._heard_at: float | None = None
        self._looked_at: float | None = None
        self.silence_s = STARTING_SILENCE_S
        """How long the router may send nothing after its first message."""
        self.losses: list[str] = []
        """Reasons for which shards were declared lost; the reader empties the list."""

    @property
    def descriptors(self) -> tuple[int, int]:
        """The ends that the router inherits."""
        return self.progress_fd, self.launcher_fd

    @property
    def flags(self) -> tuple[str, str]:
        """The router's flags with these ends."""
        return f"--progress-fd={self.progress_fd}", f"--launcher-fd={self.launcher_fd}"

    def hand_over(self) -> None:
        """Closes the router's ends here: from now on only the router has them."""
        for descriptor in self._inherited:
            os.close(descriptor)
        self._inherited = ()

    def close(self) -> None:
        """Closes all ends."""
        self.hand_over()
        os.close(self._reports)
        os.close(self._messages)

    def tell(self, message: str) -> None:
        """Writes a message, unless it is the last one again; one that has no room is dropped."""
        if message == self._told:
            return
        # A line of this size is written whole or not at all.
        line = message.replace("\n", " ").encode()[: select.PIPE_BUF - 1] + b"\n"
        # The router does not read, or has ended, which is noticed elsewhere.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._messages, line)
            self._told = message

    def note_serving(self) -> None:
        """The router answers clients from now on."""
        self.silence_s = SILENCE_S

    def is_silent(self, now: float) -> bool:
        """Reads the reports; whether there were none for too long. False before the router's first
        message."""
        has_data = self._read()
        is_gap = self._looked_at is not None and now - self._looked_at > GAP_S
        self._looked_at = now
        if has_data or (is_gap and self._heard_at is not None):
            self._heard_at = now
        return self._heard_at is not None and now - self._heard_at > self.silence_s

    def _read(self) -> bool:
        has_data = False
        with suppress(BlockingIOError):
            while data := os.read(self._reports, MOST_BYTES):
                has_data = True
                *lines, self._rest = (self._rest + data).split(b"\n")
                self._rest = self._rest[:MOST_BYTES]
                self.losses += [why for why in map(_loss, lines) if why is not None]
        return has_data


def _loss(line: bytes) -> str | None:
    """Why the shards are lost, if the line reports this."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("event") != "lost":
        return None
    return str(record.get("why", "the router gave no reason"))
