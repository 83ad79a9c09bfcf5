"""Log lines: read from a child's output, and printed by the launcher."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from text_generation_process.descriptors import Output

TARGET = "text_generation_launcher"
STDOUT = 1
LEVELS = ("DEBUG", "INFO", "WARN", "ERROR")
# Fields that name a request, and their names in a line of text.
_OF_REQUEST = {"route": "route", "request_id": "id", "trace_id": "trace"}
_SPELLINGS = {"TRACE": "DEBUG", "WARNING": "WARN", "SUCCESS": "INFO", "CRITICAL": "ERROR"}


def now() -> str:
    """The time in the format of every process: UTC, microseconds, `Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of the log, of the launcher or of a child."""

    level: str
    target: str
    message: str
    timestamp: str = field(default_factory=now)
    rank: int | None = None
    """The shard that logged it, if there are several."""
    of_request: tuple[tuple[str, str], ...] = ()
    """The request that it is about, if any: fields of its record."""

    def format(self, json_output: bool) -> str:
        """The line as it is printed, without its line feed."""
        if not json_output:
            rank = "" if self.rank is None else f" rank={self.rank}"
            request = "".join(f" {_OF_REQUEST[name]}={value}" for name, value in self.of_request)
            return f"{self.timestamp} {self.level:>5} {self.target}{rank}: {self.message}{request}"
        record: dict[str, object] = {
            "timestamp": self.timestamp,
            "level": self.level,
            "target": self.target,
            "message": self.message,
            **dict(self.of_request),
        }
        if self.rank is not None:
            record["rank"] = self.rank
        return json.dumps(record, ensure_ascii=False)


def normalize_level(level: str) -> str | None:
    """One of LEVELS for any usual spelling of it, or None."""
    level = level.upper()
    level = _SPELLINGS.get(level, level)
    return level if level in LEVELS else None


def parse_line(text: str, target: str) -> LogLine | Mapping[str, object]:
    """A line of a child: a JSON log record, its answer (any other JSON object), or plain text,
    which becomes an INFO line of that child."""
    record: object = None
    if text.startswith("{"):
        try:
            record = json.loads(text)
        except ValueError:
            record = None  # only looks like JSON
    if not isinstance(record, dict):
        return LogLine("INFO", target, text)
    if "message" not in record or "level" not in record:
        return record
    return LogLine(
        level=normalize_level(str(record["level"])) or "INFO",
        target=str(record.get("target", target)),
        message=str(record["message"]),
        timestamp=str(record.get("timestamp", now())),
        of_request=tuple((name, str(record[name])) for name in _OF_REQUEST if name in record),
    )


class Log:
    """Owns the launcher's standard output. Every thread may write; none waits for the reader, see
    `Output`.
    """

    def __init__(self, level: str, json_output: bool) -> None:
        self._rank = LEVELS.index(level)
        self._json_output = json_output
        self._output = Output(STDOUT, self._describe_gap)

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

    def _describe_gap(self, num_lines: int) -> str:
        lines = "1 line was" if num_lines == 1 else f"{num_lines} lines were"
        message = f"{lines} dropped here, because the log was not read"
        return LogLine("WARN", TARGET, message).format(self._json_output)

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
