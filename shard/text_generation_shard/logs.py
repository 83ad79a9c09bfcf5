"""One log line per event on standard output, as text or as a JSON object."""

import atexit
import json
import logging
import sys
from datetime import UTC, datetime
from functools import partial

from text_generation_shard.descriptors import LineStream, Output, fill_standard_descriptors

_STDOUT, _STDERR = 1, 2


class _LineFormatter(logging.Formatter):
    def __init__(self, json_output: bool) -> None:
        super().__init__()
        self._json_output = json_output

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        target = record.name.partition(".")[0]
        if self._json_output:
            return json.dumps(
                {
                    "timestamp": moment,
                    "level": record.levelname,
                    "target": target,
                    "message": message,
                }
            )
        return f"{moment} {record.levelname:>5} {target}: {message}"


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


def set_up(level: str, json_output: bool) -> Output:
    """Send records of `level` and above to standard output, and what is printed besides, tracebacks
    too, where it goes. Returns what is written through."""
    fill_standard_descriptors()
    formatter = _LineFormatter(json_output)
    output, errors = (
        Output(descriptor, partial(_describe_gap, formatter)) for descriptor in (_STDOUT, _STDERR)
    )
    handler = _Handler(output)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    sys.stdout, sys.stderr = LineStream(output, _STDOUT), LineStream(errors, _STDERR)
    for stream in (sys.stdout, sys.stderr):
        atexit.register(stream.finish)
    return output


def _describe_gap(formatter: _LineFormatter, num_lines: int) -> str:
    what = "lines dropped here, because nobody read the log: %d"
    return formatter.format(
        logging.LogRecord(__package__, logging.WARNING, "", 0, what, (num_lines,), None)
    )
