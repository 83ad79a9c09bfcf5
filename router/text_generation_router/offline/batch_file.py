"""Files of requests and results, in the form of OpenAI's batch API: one JSON object per line."""

import fcntl
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from text_generation_router.line_ends import without_line_ends

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


class BatchFileError(Exception):
    """A file can not be used; the message says why and what to do."""


class LineError(Exception):
    """A line that is not a valid request; becomes the `error` of its result."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str
    body: bytes


def read_request(line: bytes) -> BatchRequest:
    """The request of a line. Raises LineError."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise LineError("invalid_json_line", f"The line is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise LineError("invalid_json_line", "The line is not a JSON object")
    custom_id = record.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("missing_custom_id", "`custom_id` must be a string that is not empty")
    if record.get("method") != "POST":
        raise LineError("invalid_method", "`method` must be POST", custom_id)
    url, body = record.get("url"), record.get("body")
    if url not in URLS:
        raise LineError("invalid_url", f"`url` must be one of {', '.join(URLS)}", custom_id)
    if not isinstance(body, dict):
        raise LineError("invalid_body", "`body` must be a JSON object", custom_id)
    if body.get("stream"):
        raise LineError("invalid_body", "`stream` is not supported: remove it", custom_id)
    try:
        return BatchRequest(custom_id, url, orjson.dumps(body))
    except TypeError as error:  # the only possible reason is its depth
        raise LineError("invalid_body", f"`body` can not be read: {error}", custom_id) from error


def custom_id_of(line: bytes) -> str | None:
    """The `custom_id` of a line, if it has one."""
    try:
        return read_request(line).custom_id
    except LineError as error:
        return error.custom_id


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of the input that are not blank."""
    with path.open("rb") as file:
        for line in file:
            if stripped := line.removeprefix(b"\xef\xbb\xbf").strip():
                yield stripped


def response_line(custom_id: str, status_code: int, body: bytes) -> bytes:
    """The result of a request that was answered, with any status; `body` is JSON."""
    request_id = f"req_{uuid.uuid4().hex}"
    response = {"status_code": status_code, "request_id": request_id, "body": orjson.Fragment(body)}
    return _line(custom_id, response, None)


def error_line(error: LineError) -> bytes:
    """The result of a line that is not a valid request."""
    return _line(error.custom_id, None, {"code": error.code, "message": str(error)})


def _line(custom_id: str | None, response: Any, error: Any) -> bytes:
    record = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return without_line_ends(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))


class ResultsFile:
    """Owns the output file: complete lines in the order of the input, kept between runs.

    An incomplete last line of an interrupted run is cut off. A lock keeps other batches out.
    """

    def __init__(self, path: Path) -> None:
        """Raises BatchFileError if the file is in use or has other content."""
        self._path = path
        try:
            self._file = os.fdopen(
                os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b"
            )
        except OSError as error:
            raise BatchFileError(f"--output {path} can not be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise BatchFileError(f"--output {path} is being written by another batch") from None
        self.custom_ids: list[str | None] = []
        """Of the results in the file."""
        self.num_failed = 0
        """The number of these results that are errors."""
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def append(self, line: bytes) -> None:
        """Adds a result, flushed to the operating system."""
        self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        """Releases the file for another batch."""
        self._file.close()

    def _read(self) -> None:
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                record = orjson.loads(line)
                response = record["response"]
                custom_id = record["custom_id"]
                is_answer = response is not None and response["status_code"] == 200
            except (ValueError, TypeError, KeyError) as error:
                number = len(self.custom_ids) + 1
                raise BatchFileError(
                    f"line {number} of --output {self._path} is not a result of a batch: choose "
                    "another file, or remove this one"
                ) from error
            self.custom_ids.append(custom_id)
            self.num_failed += not is_answer
            end += len(line)
        self._file.truncate(end)
        self._file.seek(end)
