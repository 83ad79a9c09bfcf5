"""Child processes, which can not outlive the launcher; their lines, and the launcher's own log."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

from text_generation_process.log import (
    LEVELS,
    OF_REQUEST,
    STDOUT,
    LogLine,
    Output,
    describe_gap,
    normalize_level,
    timestamp_of,
)
from text_generation_process.worker import end_with_parent

TARGET = "text_generation_launcher"
RECENT_LINES = 20
MAX_LINE_BYTES = 1 << 20
"""A longer line is relayed in pieces, so that a child can't fill the launcher's memory."""
STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
# Of /proc/PID/stat, counted from 1 as proc(5) does: where the command line begins and ends.
_ARGUMENTS_PLACES = (48, 49)


class ProcessError(Exception):
    """A child that can't be started, in one sentence."""


@dataclass(frozen=True, slots=True)
class Command:
    """What a child is started with."""

    name: str
    """As the log calls it: `shard 0`."""
    target: str
    """The log target of its lines that aren't log records."""
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    draws: bool = False
    """Its standard error is the launcher's, on which it draws a progress bar."""
    rank: int | None = None
    """In each of its log lines; None: there is one process of its kind."""
    descriptors: tuple[int, ...] = ()
    """Inherited descriptors besides the standard ones."""


def block_signals() -> None:
    """Blocks the signals that `Supervisor` waits for, so that none interrupts other code or is
    lost. Called once, in the main thread, before any other thread starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS | {signal.SIGCHLD})


def conceal(secrets: Collection[str]) -> None:
    """Overwrites the secrets on this process's own command line, which all users of the machine can
    read. (Python has its own copy.)"""
    if not secrets:
        return
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[place - 3]) for place in _ARGUMENTS_PLACES)
    hidden = {os.fsencode(secret) for secret in secrets}
    for argument in ctypes.string_at(start, end - start).split(b"\0"):
        value = argument.partition(b"=")[2] if argument.startswith(b"-") else argument
        if value in hidden:
            ctypes.memset(start + len(argument) - len(value), ord("x"), len(value))
        start += len(argument) + 1


def end_with_stdin() -> None:
    """Sends SIGTERM to this process when its standard input ends. Call `block_signals()` first."""

    def watch() -> None:
        while os.read(0, 4096):
            continue  # only the end counts
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin", daemon=True).start()


def _begin(parent: int) -> None:
    """Runs in the child between fork and exec: the kernel kills the child when the launcher's
    main thread ends."""
    end_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class ManagedProcess(subprocess.Popen[bytes]):
    """One running child, with its two pipes.

    Must be created by the main thread: the kernel kills the child when the thread that forked it
    ends. A reader thread passes every line to `on_line`. While the child starts, an ERROR line is
    held until the next line. If it is the last line, the launcher logs it once, as the reason of
    its own end.
    """

    def __init__(self, command: Command, on_line: Callable[[LogLine], None]) -> None:
        """Raises ProcessError."""
        self.name = command.name
        self.answer: Mapping[str, object] | None = None
        """The last JSON object the child printed that isn't a log record."""
        self._command = command
        self._on_line = on_line
        self._recent: deque[LogLine] = deque(maxlen=RECENT_LINES)
        self._held: LogLine | None = None
        self._is_starting = True
        self._lock = threading.Lock()
        parent = os.getpid()
        try:
            super().__init__(
                command.argv,
                env=command.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if command.draws else subprocess.PIPE,
                start_new_session=True,
                pass_fds=command.descriptors,
                preexec_fn=lambda: _begin(parent),
            )
        except OSError as error:
            raise ProcessError(
                f"cannot start {command.name}: {command.argv[0]}: {error.strerror}: "
                "check the installation and the memory that is free"
            ) from error
        self._readers = [
            threading.Thread(target=self._relay, args=(pipe,), daemon=True)
            for pipe in (self.stdout, self.stderr)
            if pipe is not None
        ]
        for reader in self._readers:
            reader.start()

    @property
    def is_alive(self) -> bool:
        """False once the child has ended; its exit code is then known."""
        return self.poll() is None

    @property
    def last_message(self) -> str:
        """Its last log message, empty if there is none."""
        with self._lock:
            return self._recent[-1].message if self._recent else ""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False  # it has ended
        return state in ("T", "t")

    @property
    def is_failing(self) -> bool:
        """Whether an error is its last line, and it has not started: it is about to end."""
        with self._lock:
            return self._held is not None

    def last_words(self) -> tuple[str, ...]:
        """The ERROR lines at its end in order, if there are any; else its last RECENT_LINES lines.

        The caller logs them: a held line is not passed to `on_line` any more.
        """
        with self._lock:
            self._held = None
            lines = list(self._recent)
        others = [place for place, line in enumerate(lines) if line.level != "ERROR"]
        first_error = others[-1] + 1 if others else 0
        return tuple(line.message for line in lines[first_error:] or lines)

    def settle(self) -> None:
        """The child has started: no line is held any more."""
        with self._lock:
            self._is_starting = False
            held, self._held = self._held, None
        if held:
            self._on_line(held)

    def kill(self) -> None:
        """Kills the child and its process group, and returns when the last lines are read."""
        with contextlib.suppress(ProcessLookupError):  # its process group is empty
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        self.drain()

    def drain(self) -> None:
        """Waits, at most a second for each pipe, until the lines of an ended child are read."""
        for reader in self._readers:
            reader.join(timeout=1)

    def _relay(self, pipe: IO[bytes]) -> None:
        with pipe:
            for data in iter(lambda: pipe.readline(MAX_LINE_BYTES), b""):
                # A progress bar rewrites its line: only the last state counts.
                text = data.decode("utf-8", "replace").rstrip().rsplit("\r", 1)[-1]
                if text:
                    self._take(text)

    def _take(self, text: str) -> None:
        parsed = parse_line(text, self._command.target)
        if not isinstance(parsed, LogLine):
            self.answer = parsed
            return
        parsed = replace(parsed, rank=self._command.rank)
        with self._lock:
            self._recent.append(parsed)
            due = [self._held] if self._held else []
            self._held = parsed if self._is_starting and parsed.level == "ERROR" else None
            if self._held is None:
                due.append(parsed)
        for line in due:
            self._on_line(line)


def parse_line(text: str, target: str) -> LogLine | Mapping[str, object]:
    """A line of a child: a JSON log record, its answer (any other JSON object), or plain text,
    which becomes an INFO line of that child."""
    record: object = None
    with contextlib.suppress(ValueError):  # it only looks like JSON
        record = json.loads(text) if text.startswith("{") else None
    if not isinstance(record, dict):
        return LogLine("INFO", target, text)
    if "message" not in record or "level" not in record:
        return record
    given = {name: str(value) for name, value in record.items()}
    return LogLine(
        level=normalize_level(given["level"]) or "INFO",
        target=given.get("target", target),
        message=given["message"],
        of_request={name: given[name] for name in OF_REQUEST if name in given},
        timestamp=given.get("timestamp") or timestamp_of(),
    )


def reap_orphans(children: Collection[ManagedProcess]) -> None:
    """Waits for ended processes that this process has adopted but not started. Otherwise they stay
    as zombies: the first process of a container adopts all orphans.

    `children` are all that were started here.
    """
    # The process id of an ended child may be reused.
    own = {child.pid: child for child in children if child.is_alive}
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return  # no child and no orphan
        if ended is None:
            return
        if (child := own.pop(ended.si_pid, None)) is not None:
            assert not child.is_alive  # which also waits for it
        else:
            os.waitpid(ended.si_pid, 0)


class Log:
    """Owns the launcher's standard output. Every thread may write; none waits for the reader, see
    `Output`.
    """

    def __init__(self, level: str, json_output: bool) -> None:
        self._rank = LEVELS.index(level)
        self._json_output = json_output
        self._output = Output(STDOUT, partial(describe_gap, TARGET, json_output))

    def write(self, line: LogLine) -> None:
        """Prints a line of a child, which has already filtered by level."""
        self._output.write(line.format(self._json_output))

    def answer(self, record: Mapping[str, object]) -> None:
        """With --json-output, prints a JSON object for the program that started this one. It has no
        fields of a log line, and is never dropped."""
        if self._json_output:
            self._output.write(json.dumps(record, ensure_ascii=False), is_needed=True)

    def close(self) -> None:
        """Waits up to a second for the reader of the last lines."""
        self._output.flush()

    def _log(self, level: str, message: str) -> None:
        if LEVELS.index(level) >= self._rank:
            line = LogLine(level, TARGET, message).format(self._json_output)
            # The launcher logs few lines itself, and the last one is the reason of its end.
            self._output.write(line, is_needed=True)

    def info(self, message: str) -> None:
        """Events."""
        self._log("INFO", message)

    def error(self, message: str) -> None:
        """The reason of the launcher's end."""
        self._log("ERROR", message)
