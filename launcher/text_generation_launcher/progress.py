"""The pipe on which the router reads what the shards do before they serve."""

import os
import select

TOLD = ("loading weights: ", "compiling the kernels ")
"""Beginnings of the log messages of shards that any client may read: they hold no paths."""


class ProgressPipe:
    """Owns both ends of one pipe, until closed. Never waits: a line that has no room is dropped.

    Each line is a message for people; an empty one says that nothing is known. The router shows the
    last one.
    """

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        """The end that the router inherits."""
        os.set_blocking(self._writer, False)
        self._is_open = True
        self._told = ""

    def hand_over(self) -> None:
        """Closes the reading end here: from now on only the router has it."""
        if self._is_open:
            os.close(self.reader)
            self._is_open = False

    def tell(self, message: str) -> None:
        """Writes a message, unless it is the last one again."""
        if message == self._told:
            return
        # A line of this size is written whole or not at all.
        line = message.replace("\n", " ").encode()[: select.PIPE_BUF - 1] + b"\n"
        try:
            os.write(self._writer, line)
        except (BlockingIOError, BrokenPipeError):
            return  # the router does not read, or has ended, which is noticed elsewhere
        self._told = message

    def close(self) -> None:
        """Closes both ends."""
        self.hand_over()
        os.close(self._writer)
