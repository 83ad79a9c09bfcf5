"""Log lines of the router, as text or as one JSON object a line, on standard output."""

import logging
import sys
from datetime import UTC, datetime

import orjson

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
        return orjson.dumps(line).decode()


def configure_logs(level: str, json_output: bool) -> None:
    """Sends every log line of this process, libraries included, to standard output."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(LineFormatter(json_output))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    handler.addFilter(_is_news)
    # uvicorn announces itself at INFO; what it has to say about failures starts at WARNING.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))


def _is_news(record: logging.LogRecord) -> bool:
    """False for what uvicorn says about a stream that was cut off: `EventStream` has said why."""
    return record.msg != "ASGI callable returned without completing response."
