"""Log lines: read from a child's output, and printed by the launcher."""

import json
from collections.abc import Mapping
from functools import partial

from text_generation_process.descriptors import STDOUT, Output
from text_generation_process.log import (
    LEVELS,
    OF_REQUEST,
    LogLine,
    describe_gap,
    normalize_level,
    timestamp_of,
)

TARGET = "text_generation_launcher"


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
    given = {name: str(value) for name, value in record.items()}
    return LogLine(
        level=normalize_level(given["level"]) or "INFO",
        target=given.get("target", target),
        message=given["message"],
        of_request={name: given[name] for name in OF_REQUEST if name in given},
        timestamp=given.get("timestamp") or timestamp_of(),
    )


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
