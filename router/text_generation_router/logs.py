"""Log lines of the router, as text or as one JSON object a line, on standard output."""

import atexit
import logging
import os
import sys
from datetime import UTC, datetime
from functools import partial

import orjson

from text_generation_router.descriptors import LineStream, Output, fill_standard_descriptors

STDOUT, STDERR = 1, 2

_SHORT_LEVELS = {"WARNING": "WARN"}


class LineFormatter(logging.Formatter):
    """`2026-11-21T09:45:49.123456Z  INFO text_generation_router: message`, or the same as JSON."""

    def __init__(self, json_output: bool) -> None:
        super().__init__()
        self._json_output = json_output

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        timestamp = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
        level = _SHORT_LEVELS.get(record.levelname, record.levelname)
        message = record.getMessage()
        if record.exc_info:
            message = f"{message.rstrip()}\n{self.formatException(record.exc_info)}"
        if not self._json_output:
            return f"{timestamp} {level:>5} {record.name}: {message}"
        line = {"timestamp": timestamp, "level": level, "target": record.name, "message": message}
        try:
            return orjson.dumps(line).decode()
        except TypeError:  # names of files need not be text
            line["message"] = message.encode("utf-8", "backslashreplace").decode()
            return orjson.dumps(line).decode()


class _Handler(logging.Handler):
    """Hands lines to an `Output`, so that nobody waits for whoever reads the log."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._output.write(self.format(record))
        except Exception:  # as every handler of Python's: it says so, and goes on
            self.handleError(record)


def configure_logs(level: str, json_output: bool) -> Output:
    """Sends every log line of this process, libraries included, to standard output, and what is
    printed besides, tracebacks too, where it goes, but for a terminal, on which bars are drawn.

    Returns what is written through. It may lose lines, and counts them.
    """
    fill_standard_descriptors()
    formatter = LineFormatter(json_output)
    output = Output(STDOUT, partial(_describe_gap, formatter))
    handler = _Handler(output)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    handler.addFilter(_is_news)
    # uvicorn announces itself at INFO; what it has to say about failures starts at WARNING.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    sys.stdout = LineStream(output, STDOUT)
    atexit.register(sys.stdout.finish)
    if not os.isatty(STDERR):
        errors = Output(STDERR, partial(_describe_gap, formatter))
        sys.stderr = LineStream(errors, STDERR)
        atexit.register(sys.stderr.finish)
    return output


def _describe_gap(formatter: LineFormatter, num_lines: int) -> str:
    name, what = "text_generation_router", "lines dropped here, because nobody read the log: %d"
    return formatter.format(
        logging.LogRecord(name, logging.WARNING, "", 0, what, (num_lines,), None)
    )


def _is_news(record: logging.LogRecord) -> bool:
    """False for what uvicorn says about a stream that was cut off: `EventStream` has said why."""
    return record.msg != "ASGI callable returned without completing response."
