"""One log line per event on standard output, as text or as a JSON object."""

import json
import logging
from datetime import UTC, datetime

from text_generation_process.descriptors import Output
from text_generation_process.logs import send_to_output


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


def set_up(level: str, json_output: bool) -> Output:
    """Send records of `level` and above to standard output; see `send_to_output`."""
    return send_to_output(level, _LineFormatter(json_output), "text_generation_shard")
