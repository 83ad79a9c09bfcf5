"""Runs the child processes of the GPU benchmark; collects their figures and records crashes."""

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

# As in gpu_timing, which imports torch.
MARK = "@gpu "
# Seconds for a process to start, and for a section beyond its limit: one compilation, allocation or
# measurement.
_START_S = 90.0
_GRACE_S = 45.0
# With less time left no section starts.
_LEAST_S = 5.0


@dataclass
class Found:
    """The records, in order of measurement."""

    limits: dict[str, float] = field(default_factory=dict)
    """GB/s and TFLOP/s; see gpu_timing.Limits."""
    records: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """The reason by section, one sentence each."""
    left_out: list[str] = field(default_factory=list)
    """Sections for which there was no time."""


def measure_all(
    command: Sequence[str],
    sections: Sequence[str],
    until: float,
    write: Callable[[Found], object],
) -> Found:
    """Runs sections in children started with `command`, until time.monotonic() is `until`. `write`
    gets the results after each section, so that a crash of the parent loses nothing."""
    found, waiting = Found(), list(sections)
    while waiting:
        left = until - time.monotonic()
        if left < _LEAST_S:
            found.left_out += waiting
            break
        limits = ["--limits", json.dumps(found.limits)] if found.limits else []
        asked = ["--seconds", str(left), *limits, "--child", *waiting]
        with tempfile.TemporaryFile("w+") as errors:
            _Child([*command, *asked], errors, found, waiting, write).run(until)
    return found


class _Child:
    """Runs one process. Removes the sections that ended, or that ended the process, from the
    waiting ones."""

    def __init__(
        self,
        command: Sequence[str],
        errors: IO[str],
        found: Found,
        waiting: list[str],
        write: Callable[[Found], object],
    ) -> None:
        self._errors, self._found, self._waiting = errors, found, waiting
        self._write = write
        self._running, self._has_begun = "", False
        self._stop = time.monotonic() + _START_S
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
        )
        self._lines: queue.Queue[str | None] = queue.Queue()

    def run(self, until: float) -> None:
        """Read its output until it ends or hangs."""
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        while True:
            try:
                line = self._lines.get(timeout=max(0.1, self._stop - time.monotonic()))
            except queue.Empty:
                self._process.kill()
                self._process.wait()
                reader.join()
                return self._give_up("it took too long, and its process was ended")
            if line is None:
                break
            if line.startswith(MARK):
                self._take(json.loads(line.removeprefix(MARK)), until)
        status = self._process.wait()
        if self._waiting:
            self._give_up(f"its process ended with {status}: {self._last_words()}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as said:
            for line in said:
                self._lines.put(line)
        self._lines.put(None)

    def _take(self, message: dict[str, Any], until: float) -> None:
        if "record" in message:
            self._found.records.append(message["record"])
        elif "limits" in message:
            self._found.limits = message["limits"]
        elif "begins" in message:
            self._running, self._has_begun = message["begins"], True
            own = time.monotonic() + message["seconds"]
            self._stop = min(own, until) + _GRACE_S
            print(f"{self._running} …", file=sys.stderr, flush=True)
        else:
            self._waiting.remove(message["ended"])
            self._running, self._stop = "", time.monotonic() + _GRACE_S
            self._write(self._found)

    def _give_up(self, reason: str) -> None:
        """The running section has failed; all of them if none had started. Between two sections
        none fails, and the next process runs the rest."""
        none_began = [] if self._has_begun else list(self._waiting)
        for name in [self._running] if self._running else none_began:
            self._waiting.remove(name)
            self._found.failed[name] = reason

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read()[-2000:].splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"
