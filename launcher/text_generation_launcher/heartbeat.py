"""The pipe on which the router reports that its event loop runs."""

import json
import os

SILENCE_S = 5.0
"""A router that sends nothing for this time after its first message does not serve clients."""
STARTING_SILENCE_S = 60.0
"""The same until it serves: a large tokenizer blocks its event loop while it is read."""
GAP_S = 3.0
"""After a longer gap between two reads this process was stopped itself: no verdict."""
MOST_BYTES = 1 << 16
"""Capacity of a pipe, and the maximum that is kept of an unfinished line."""


class Heartbeat:
    """Owns both ends of one pipe, until closed. Times are seconds of a monotonic clock.

    The router writes one JSON object per line: `{"event": "alive"}`, and
    `{"event": "lost", "why": "<sentence>"}` when it declares the shards lost. Any other data counts
    as alive.
    """

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        """The end that the router inherits."""
        os.set_blocking(self._reader, False)
        self._is_open = True
        self._rest = b""
        self._heard_at: float | None = None
        self._looked_at: float | None = None
        self.patience_s = STARTING_SILENCE_S
        """How long the router may send nothing after its first message."""
        self.losses: list[str] = []
        """Reasons for which shards were declared lost; the reader empties the list."""

    def hand_over(self) -> None:
        """Closes the writing end here: from now on only the router has it, and it ends with it."""
        if self._is_open:
            os.close(self.writer)
            self._is_open = False

    def note_serving(self) -> None:
        """The router answers clients from now on."""
        self.patience_s = SILENCE_S

    def is_silent(self, now: float) -> bool:
        """Reads the pipe; whether it was empty for too long. False before the router's first
        message."""
        has_data = self._read()
        is_gap = self._looked_at is not None and now - self._looked_at > GAP_S
        self._looked_at = now
        if has_data or (is_gap and self._heard_at is not None):
            self._heard_at = now
        return self._heard_at is not None and now - self._heard_at > self.patience_s

    def close(self) -> None:
        """Closes both ends."""
        self.hand_over()
        os.close(self._reader)

    def _read(self) -> bool:
        has_data = False
        while True:
            try:
                data = os.read(self._reader, MOST_BYTES)
            except BlockingIOError:
                return has_data
            if not data:
                return has_data  # the router has ended, which is noticed elsewhere
            has_data = True
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._rest = self._rest[:MOST_BYTES]
            self.losses += [why for why in map(_loss, lines) if why is not None]


def _loss(line: bytes) -> str | None:
    """Why the shards are lost, if the line reports this."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("event") != "lost":
        return None
    return str(record.get("why", "the router gave no reason"))
