"""Log lines of the router on standard output, as text or as one JSON object per line."""

import logging
from datetime import UTC, datetime

import orjson
from text_generation_process.descriptors import Output, send_to_output

from text_generation_router.request_id import current

_SHORT_LEVELS = {"WARNING": "WARN"}


class LineFormatter(logging.Formatter):
    """`2026-11-21T09:45:49.123456Z  INFO text_generation_router: message`, or the same as JSON; a
    request's line also has its route, id and trace id."""

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
        request = current()
        if not self._json_output:
            name = "" if request is None else f" route={request.route} id={request.request_id}"
            if request is not None and request.trace_id:
                name += f" trace={request.trace_id}"
            return f"{timestamp} {level:>5} {record.name}: {message}{name}"
        line = {"timestamp": timestamp, "level": level, "target": record.name, "message": message}
        if request is not None:
            line |= {"route": request.route, "request_id": request.request_id}
            if request.trace_id:
                line["trace_id"] = request.trace_id
        try:
            return orjson.dumps(line).decode()
        except TypeError:  # file names may be invalid Unicode
            line["message"] = message.encode("utf-8", "backslashreplace").decode()
            return orjson.dumps(line).decode()


def configure_logs(level: str, json_output: bool) -> Output:
    """Sends every log line of this process to standard output; see `send_to_output`."""
    output = send_to_output(level, LineFormatter(json_output), "text_generation_router")
    # uvicorn logs its start at INFO and failures from WARNING on.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_new)
    return output


def _is_new(record: logging.LogRecord) -> bool:
    """False for uvicorn's line about a stream that was aborted: `EventStream` has logged why."""
    return record.msg != "ASGI callable returned without completing response."
