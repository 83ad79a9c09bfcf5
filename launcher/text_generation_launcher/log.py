"""Log lines: what a child printed, and how the launcher prints it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from text_generation_process.descriptors import Output

TARGET = "text_generation_launcher"
STDOUT = 1
LEVELS = ("DEBUG", "INFO", "WARN", "ERROR")
_SPELLINGS = {"TRACE": "DEBUG", "WARNING": "WARN", "SUCCESS": "INFO", "CRITICAL": "ERROR"}


def now() -> str:
    """The time as every process of the server writes it: UTC, microseconds, `Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of the log, of the launcher or of a child."""

    level: str
    target: str
    message: str
    timestamp: str = field(default_factory=now)
    rank: int | None = None
    """Of several shards the one that said it."""

    def format(self, json_output: bool) -> str:
        """The line as it is printed, without its line feed."""
        if not json_output:
            rank = "" if self.rank is None else f" rank={self.rank}"
            return f"{self.timestamp} {self.level:>5} {self.target}{rank}: {self.message}"
        record: dict[str, object] = {
            "timestamp": self.timestamp,
            "level": self.level,
            "target": self.target,
            "message": self.message,
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
    """What a child meant by a line: a JSON log record, its answer (any other JSON object), or
    plain text, which is logged as INFO of that child."""
    record: object = None
    if text.startswith("{"):
        try:
            record = json.loads(text)
        except ValueError:
            record = None  # a line that only looks like JSON is plain text
    if not isinstance(record, dict):
        return LogLine("INFO", target, text)
    if "message" not in record or "level" not in record:
        return record
    return LogLine(
        level=normalize_level(str(record["level"])) or "INFO",
        target=str(record.get("target", target)),
        message=str(record["message"]),
        timestamp=str(record.get("timestamp", now())),
    )


class Log:
    """Owns the launcher's standard output; every thread may write to it, and none waits for whoever
    reads it, see `Output`.
    """

    def __init__(self, level: str, json_output: bool) -> None:
        self._rank = LEVELS.index(level)
        self._json_output = json_output
        self._output = Output(STDOUT, self._describe_gap)

    def write(self, line: LogLine) -> None:
        """Prints a line as it is; children have filtered theirs by level already."""
        self._output.write(line.format(self._json_output))

    def answer(self, record: Mapping[str, object]) -> None:
        """Tells the program that started this one, if one reads the log, what it waits for: a JSON
        object without the fields of a log line. It is never dropped."""
        if self._json_output:
            self._output.write(json.dumps(record, ensure_ascii=False), is_needed=True)

    def close(self) -> None:
        """Gives whoever reads the log a second for the last lines."""
        self._output.flush()

    def _describe_gap(self, num_lines: int) -> str:
        lines = "1 line was" if num_lines == 1 else f"{num_lines} lines were"
        message = f"{lines} dropped here, because nobody read the log"
        return LogLine("WARN", TARGET, message).format(self._json_output)

    def _log(self, level: str, message: str) -> None:
        if LEVELS.index(level) >= self._rank:
            line = LogLine(level, TARGET, message).format(self._json_output)
            # There are few of the launcher's own, and the last of them says why it ends.
            self._output.write(line, is_needed=True)

    def debug(self, message: str) -> None:
        """What only a developer wants to know."""
        self._log("DEBUG", message)

    def info(self, message: str) -> None:
        """What happens."""
        self._log("INFO", message)

    def error(self, message: str) -> None:
        """Why the launcher ends."""
        self._log("ERROR", message)
