"""The descriptors of a process: output that never waits for its reader; their maximum number."""

import io
import os
import resource
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

MAX_BYTES = 1 << 20
MAX_LINES = 4096
LAST_WORDS_S = 1.0
"""How long an ending process waits for its reader."""


class Output:
    """Owns the unwritten lines of one descriptor, and the thread that writes them. Threads and
    signal handlers may write, and never wait.

    Lines are written whole and in order. At most MAX_BYTES and MAX_LINES are kept. Beyond that,
    lines are dropped until all kept lines are written. Then one line, made by `describe`, has their
    number.
    """

    def __init__(self, descriptor: int, describe: Callable[[int], str]) -> None:
        self.num_dropped = 0
        """Dropped lines since the start."""
        self._descriptor = descriptor
        self._describe = describe
        self._kept: deque[bytes] = deque()
        self._num_bytes = 0
        self._gap = 0
        """Lines dropped after the kept ones."""
        # Reentrant: a signal handler may write in the middle of another line.
        self._changed = threading.Condition(threading.RLock())
        # A daemon, so that the process can end while the thread waits.
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def write(self, text: str, is_needed: bool = False) -> None:
        """Writes one or more lines, which stay together. Needed lines are never dropped."""
        data = _encode(text)
        with self._changed:
            if self._kept and not (is_needed or self._has_room(len(data))):
                self._gap += 1
                self.num_dropped += 1
            else:
                self._keep(data)

    def flush(self, timeout_s: float | None = LAST_WORDS_S) -> bool:
        """Whether the reader took everything within the time; None: no limit."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._kept, timeout_s)

    def _has_room(self, length: int) -> bool:
        return (
            not self._gap and len(self._kept) < MAX_LINES and self._num_bytes + length <= MAX_BYTES
        )

    def _keep(self, data: bytes) -> None:
        self._kept.append(data)
        self._num_bytes += len(data)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._kept)
                data = self._kept[0]
            _write_all(self._descriptor, data)
            with self._changed:
                self._num_bytes -= len(self._kept.popleft())
                if self._gap and not self._kept:
                    notice, self._gap = self._describe(self._gap), 0
                    self._keep(_encode(notice))
                self._changed.notify_all()


class LineStream(io.TextIOBase):
    """A standard stream whose lines go to an `Output`: for `print`, warnings and tracebacks."""

    def __init__(self, output: Output, descriptor: int) -> None:
        super().__init__()
        self._output, self._descriptor = output, descriptor
        self._begun = ""

    def write(self, text: str) -> int:
        """Writes complete lines, and keeps an incomplete one."""
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self._output.write("\n".join(lines))
        return len(text)

    def finish(self) -> None:
        """Writes an incomplete last line, and waits briefly for the reader."""
        if self._begun:
            self.write("\n")
        self._output.flush()

    def writable(self) -> bool:
        """Always true."""
        return True

    def fileno(self) -> int:
        """The descriptor of the stream, for code that writes to it directly."""
        return self._descriptor


def fill_standard_descriptors() -> None:
    """Opens the null device for a closed standard stream. Otherwise a pipe or socket could get its
    number, and log lines would be written to it."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one


def raise_file_limit() -> int:
    """Raises the limit of open files to the maximum, also for children; returns the limit."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (ValueError, OSError):
        return limit  # the system has lowered its maximum
    return most


def _encode(text: str) -> bytes:
    try:
        # Names of files keep their bytes.
        return f"{text}\n".encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return f"{text}\n".encode("utf-8", "replace")


def _write_all(descriptor: int, data: bytes) -> None:
    """Waits for the reader. If it is gone, the server continues without its log."""
    with suppress(OSError):
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # another process has made the pipe non-blocking
                select.select([], [descriptor], [])
