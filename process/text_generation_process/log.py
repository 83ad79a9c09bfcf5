"""The log of every process: the two forms of a line, and output that never waits for its reader."""

import atexit
import io
import json
import logging
import os
import resource
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

STDOUT, STDERR = 1, 2

MAX_BYTES = 1 << 20
MAX_LINES = 4096
LAST_WORDS_S = 1.0
"""How long an ending process waits for its reader."""
# A writable pipe or socket takes this much without waiting (PIPE_BUF of Linux).
_CHUNK_BYTES = 4096
_RETRY_S = 0.02
LEVELS = ("DEBUG", "INFO", "WARN", "ERROR")
# Fields that name a request, and their names in a line of text.
OF_REQUEST = {"route": "route", "request_id": "id", "trace_id": "trace"}
_SPELLINGS = {"TRACE": "DEBUG", "WARNING": "WARN", "SUCCESS": "INFO", "CRITICAL": "ERROR"}


class Output:
    """Owns the unwritten lines of one descriptor. Threads and signal handlers may write, and never
    wait.

    Lines are written whole and in order. Lines that the reader does not take are kept, up to
    MAX_BYTES and MAX_LINES, and a thread writes them later. Beyond that, lines are dropped until
    all kept lines are written. Then one line, made by `describe`, has their number.
    """

    def __init__(self, descriptor: int, describe: Callable[[int], str]) -> None:
        self.num_dropped = 0
        """Dropped lines since the start."""
        self._descriptor, self._never_waits = _reopened(descriptor)
        self._poller = select.poll()
        self._poller.register(self._descriptor, select.POLLOUT)
        self._describe = describe
        self._kept: deque[bytes] = deque()
        self._num_bytes = 0
        self._gap = 0
        """Lines dropped after the kept ones."""
        self._has_writer = False
        self._is_busy = False
        # Reentrant: a signal handler may write in the middle of another line.
        self._changed = threading.Condition(threading.RLock())

    def write(self, text: str, is_needed: bool = False) -> None:
        """Writes one or more lines, which stay together. Needed lines are never dropped."""
        data = _encode(text)
        with self._changed:
            if self._kept and not (is_needed or self._has_room(len(data))):
                self._gap += 1
                self.num_dropped += 1
                return
            self._keep(data)
            if self._is_busy or self._has_writer:
                return  # what writes there writes this, too
            self._is_busy = True
            self._write_kept()
            self._is_busy = False
            if self._kept:
                self._has_writer = True
                # A daemon, so that the process can end while the thread waits.
                threading.Thread(target=self._run, name="output", daemon=True).start()

    def flush(self, timeout_s: float | None = LAST_WORDS_S) -> bool:
        """Whether the reader took everything within the time; None: no limit."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._has_writer, timeout_s)

    def _has_room(self, length: int) -> bool:
        return (
            not self._gap and len(self._kept) < MAX_LINES and self._num_bytes + length <= MAX_BYTES
        )

    def _keep(self, data: bytes) -> None:
        self._kept.append(data)
        self._num_bytes += len(data)

    def _run(self) -> None:
        while True:
            self._poller.poll()
            with self._changed:
                has_taken = self._write_kept()
                if not self._kept:
                    self._has_writer = False
                    self._changed.notify_all()
                    return
            if not has_taken:
                time.sleep(_RETRY_S)

    def _write_kept(self) -> int:
        """Writes as many bytes as the reader takes, and returns their number."""
        total = 0
        while self._kept:
            taken = self._take(self._kept[0])
            total += taken
            self._num_bytes -= taken
            if taken < len(self._kept[0]):
                self._kept[0] = self._kept[0][taken:]
                break
            self._kept.popleft()
            if self._gap and not self._kept:
                notice, self._gap = self._describe(self._gap), 0
                self._keep(_encode(notice))
        return total

    def _take(self, data: bytes) -> int:
        """Writes without waiting; returns the number of bytes taken."""
        taken, most = 0, len(data) if self._never_waits else _CHUNK_BYTES
        while taken < len(data) and (self._never_waits or self._poller.poll(0)):
            try:
                taken += os.write(self._descriptor, data[taken : taken + most])
            except BlockingIOError:
                break
            except OSError:
                return len(data)  # the reader is gone: the server continues without its log
        return taken


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


def _reopened(descriptor: int) -> tuple[int, bool]:
    """A descriptor for the same pipe or terminal, and whether writing to it never waits. A new
    descriptor, because O_NONBLOCK on the old one would apply to all processes that share it."""
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            return os.open(f"/proc/self/fd/{descriptor}", flags), True
        except OSError:
            return descriptor, False  # of another user: `poll` before each write
    return descriptor, False


def normalize_level(level: str) -> str | None:
    """One of LEVELS for any usual spelling of it, or None."""
    level = level.upper()
    level = _SPELLINGS.get(level, level)
    return level if level in LEVELS else None


def timestamp_of(moment: float | None = None) -> str:
    """In the format of every process: UTC, microseconds, `Z`. None: now."""
    at = datetime.now(UTC) if moment is None else datetime.fromtimestamp(moment, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of the log of a process."""

    level: str
    target: str
    message: str
    timestamp: str = field(default_factory=timestamp_of)
    rank: int | None = None
    """The shard that logged it, if there are several."""
    of_request: Mapping[str, str] = field(default_factory=dict)
    """The request that it is about, if any: fields of its record."""

    def format(self, json_output: bool) -> str:
        """The line as it is printed, without its line feed."""
        if not json_output:
            rank = "" if self.rank is None else f" rank={self.rank}"
            request = "".join(f" {OF_REQUEST[name]}={v}" for name, v in self.of_request.items())
            return f"{self.timestamp} {self.level:>5} {self.target}{rank}: {self.message}{request}"
        record: dict[str, object] = {
            "timestamp": self.timestamp,
            "level": self.level,
            "target": self.target,
            # Names of files may be invalid Unicode, which JSON can not hold.
            "message": self.message.encode("utf-8", "backslashreplace").decode(),
            **self.of_request,
        }
        if self.rank is not None:
            record["rank"] = self.rank
        return json.dumps(record, ensure_ascii=False)


class LineFormatter(logging.Formatter):
    """Writes a record as a `LogLine`."""

    def __init__(
        self,
        json_output: bool,
        of_request: Callable[[], Mapping[str, str]] = dict,
        names_package: bool = False,
    ) -> None:
        """`of_request` returns the fields of the request that the present task serves. With
        `names_package` a line names the package, not the module, that logged it."""
        super().__init__()
        self.json_output = json_output
        self._of_request = of_request
        self._names_package = names_package

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, with the traceback of its exception."""
        message = record.getMessage()
        if record.exc_info:
            message = f"{message.rstrip()}\n{self.formatException(record.exc_info)}"
        line = LogLine(
            level=normalize_level(record.levelname) or record.levelname,
            target=record.name.partition(".")[0] if self._names_package else record.name,
            message=message,
            timestamp=timestamp_of(record.created),
            of_request=self._of_request(),
        )
        return line.format(self.json_output)


def describe_gap(target: str, json_output: bool, num_lines: int) -> str:
    """The line in the place of lines that were dropped."""
    message = f"lines dropped here, because the log was not read: {num_lines}"
    return LogLine("WARN", target, message).format(json_output)


def send_to_output(level: str, formatter: LineFormatter, target: str) -> Output:
    """Sends records of `level` and above, also those of libraries, to standard output. `print` and
    tracebacks go through an `Output`, too, except standard error on a terminal, which may have
    progress bars.

    The returned Output may drop lines; a line of `target` then has their number.
    """
    fill_standard_descriptors()
    describe = partial(describe_gap, target, formatter.json_output)
    output = Output(STDOUT, describe)
    handler = logging.StreamHandler(LineStream(output, STDOUT))
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    sys.stdout = LineStream(output, STDOUT)
    atexit.register(sys.stdout.finish)
    if not os.isatty(STDERR):
        sys.stderr = LineStream(Output(STDERR, describe), STDERR)
        atexit.register(sys.stderr.finish)
    return output
