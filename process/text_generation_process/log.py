"""Log lines of every process: their two forms, and how they reach standard output."""

import atexit
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from text_generation_process.descriptors import (
    STDERR,
    STDOUT,
    LineStream,
    Output,
    fill_standard_descriptors,
)

LEVELS = ("DEBUG", "INFO", "WARN", "ERROR")
# Fields that name a request, and their names in a line of text.
OF_REQUEST = {"route": "route", "request_id": "id", "trace_id": "trace"}
_SPELLINGS = {"TRACE": "DEBUG", "WARNING": "WARN", "SUCCESS": "INFO", "CRITICAL": "ERROR"}


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
