"""Runs `text-generation-launcher shards` as a child of this process."""

import json
import logging
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

# Between SIGTERM and SIGKILL.
END_TIMEOUT_S = 30.0
_RECENT_LINES = 20
_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING}


class ShardsProcessError(Exception):
    """The shards did not start, or have ended; the message says why."""


@dataclass(frozen=True, slots=True)
class ShardsAddress:
    """What the launcher reports when its shards are ready."""

    model_id: str
    model_path: str
    master_shard_uds_path: str


class ShardsProcess:
    """Owns a launcher that runs only shards. It logs to Python's `logging`, and ends when this
    process ends in any way, because its standard input is a pipe from here."""

    def __init__(self, flags: Sequence[str]) -> None:
        """Starts it with flags of `text-generation-launcher shards`; does not wait."""
        self._ready: Future[ShardsAddress] = Future()
        self._recent: deque[str] = deque(maxlen=_RECENT_LINES)
        self._error = ""
        self._popen = subprocess.Popen(
            [*_launcher(), "shards", "--end-with-stdin", "--json-output", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C interrupts the caller, not the model.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="shards-log", daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> ShardsAddress:
        """The shards' address. Raises ShardsProcessError if they did not start."""
        return self._ready.result()

    @property
    def is_alive(self) -> bool:
        """Whether the launcher still runs."""
        return self._popen.poll() is None

    def last_words(self) -> str:
        """Why it ended: its last error, or else its last lines."""
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=1)  # it may not have read the last lines yet
        return self._error or "\n".join(self._recent) or "it printed nothing"

    def close(self) -> None:
        """Ends the launcher and waits for its end. Idempotent."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
        try:
            self._popen.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()  # the kernel kills its children with it
            self._popen.wait()
        self._reader.join()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._take(line.decode(errors="replace").rstrip())
        self._popen.wait()
        if not self._ready.done():
            self._ready.set_exception(ShardsProcessError(self.last_words()))

    def _take(self, line: str) -> None:
        record: Any = None
        with suppress(ValueError):
            record = json.loads(line)
        if not isinstance(record, dict):
            record = {"message": line}
        if "model_path" in record:
            names = ShardsAddress.__dataclass_fields__
            self._ready.set_result(ShardsAddress(**{name: str(record[name]) for name in names}))
            return
        message = str(record.get("message", line))
        if "rank" in record:
            message = f"shard {record['rank']}: {message}"
        self._recent.append(message)
        level = record.get("level", "INFO")
        if level == "ERROR":
            self._error = message
            if not self._ready.done():
                return  # the exception of the failed start has this message
        target = str(record.get("target", logger.name))
        logging.getLogger(target).log(_LEVELS.get(str(level), logging.ERROR), "%s", message)


def _launcher() -> tuple[str, ...]:
    """The command of this installation's launcher, which may not be in PATH."""
    from text_generation_launcher.config import console_script

    return console_script("text-generation-launcher", "text_generation_launcher.cli")
