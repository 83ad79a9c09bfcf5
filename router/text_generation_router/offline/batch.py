"""Answers a file of requests with the routes of the server, without a port: the process that
`text-generation-launcher batch` starts with its shards.

Exit codes: 0, every request has an answer; 3, some have an error instead; 1, some have no result,
and another run continues.
"""

import argparse
import asyncio
import fcntl
import logging
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import uvloop
from starlette.types import ASGIApp, Message
from text_generation_process.json_file import without_line_ends
from text_generation_process.log import LineFormatter, send_to_output
from text_generation_process.option import add_flags

from text_generation_router.app import create_app
from text_generation_router.config import RouterConfig
from text_generation_router.infer import gather_or_cancel
from text_generation_router.offline.bulk import WINDOW, Tally, bar
from text_generation_router.services import Services, StartError, start

SOME_FAILED = 3
_LOG_EVERY_S = 10.0
# No request is refused because the queue is full.
_NO_LIMIT = 2**31 - 1
# Results that wait for an earlier one, so that a long answer does not block the next requests.
_MAX_HELD = 16_384

# This module runs as __main__.
logger = logging.getLogger("text_generation_router.offline.batch")


URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


class BatchError(Exception):
    """A file can not be used, or the shards are lost; the message says why and what to do."""


class LineError(Exception):
    """A line that is not a valid request; becomes the `error` of its result."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of the input that are not blank."""
    with path.open("rb") as file:
        for line in file:
            if stripped := line.removeprefix(b"\xef\xbb\xbf").strip():
                yield stripped


def read_request(line: bytes) -> tuple[str, str, bytes]:
    """The id, route and body of the request in a line. Raises LineError."""
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
        return custom_id, url, orjson.dumps(body)
    except TypeError as error:  # the only possible reason is its depth
        raise LineError("invalid_body", f"`body` can not be read: {error}", custom_id) from error


def response_line(custom_id: str, status_code: int, body: bytes) -> bytes:
    """The result of a request that was answered, with any status; `body` is JSON."""
    request_id = f"req_{uuid.uuid4().hex}"
    response = {"status_code": status_code, "request_id": request_id, "body": orjson.Fragment(body)}
    return _line(custom_id, response, None)


def error_line(error: LineError) -> bytes:
    """The result of a line that is not a valid request."""
    return _line(error.custom_id, None, {"code": error.code, "message": str(error)})


def _line(custom_id: str | None, response: Any, error: Any) -> bytes:
    record = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id}
    record |= {"response": response, "error": error}
    return without_line_ends(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))


class ResultsFile:
    """Owns the output file: complete lines in the order of the input, kept between runs.

    An incomplete last line of an interrupted run is cut off. A lock keeps other batches out.
    """

    def __init__(self, path: Path) -> None:
        """Raises BatchError if the file is in use or has other content."""
        self.path = path
        self.custom_ids: list[str | None] = []
        """Of the results in the file."""
        self.num_failed = 0
        """The number of these results that are errors."""
        with ExitStack() as stack:
            try:
                self._file = stack.enter_context(path.open("a+b"))
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BatchError(f"--output {path} is being written by another batch") from None
            except OSError as error:
                reason = error.strerror
                raise BatchError(f"--output {path} can not be written: {reason}") from error
            self._read()
            stack.pop_all()

    def append(self, line: bytes) -> None:
        """Adds a result, flushed to the operating system."""
        self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        """Releases the file for another batch."""
        self._file.close()

    def check_same(self, source: Path) -> int:
        """The number of requests in `source`. Raises BatchError if the results are of other
        requests."""
        lines = read_lines(source)
        ids: list[str | None] = []
        for line in islice(lines, len(self.custom_ids)):
            try:
                ids.append(read_request(line)[0])
            except LineError as error:
                ids.append(error.custom_id)
        if ids != self.custom_ids:
            raise BatchError(
                f"--output {self.path} has results of other requests than those in --input "
                f"{source}: choose another file, or remove this one"
            )
        return len(ids) + sum(1 for _ in lines)

    def _read(self) -> None:
        """Reads the results of earlier runs; writing continues at the end of the last whole one."""
        end = 0
        self._file.seek(0)
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
                raise BatchError(
                    f"line {number} of --output {self.path} is not a result of a batch: choose "
                    "another file, or remove this one"
                ) from error
            self.custom_ids.append(custom_id)
            self.num_failed += not is_answer
            end += len(line)
        self._file.truncate(end)


class Batch:
    """Answers the requests of a file that have no result yet, and appends the results in order.

    A bad line becomes an error result. If `run` is cancelled or fails, results that are not written
    are lost.
    """

    def __init__(
        self, app: ASGIApp, services: Services, source: Path, results: ResultsFile
    ) -> None:
        """The app's lifespan must be running."""
        self._app, self._services, self._results = app, services, results
        self._custom_ids = set(results.custom_ids)
        self._num_written = len(results.custom_ids)
        self._lines = islice(enumerate(read_lines(source)), self._num_written, None)
        # Results that wait for an earlier one, by their place in the input.
        self._held: dict[int, bytes] = {}
        self._room = asyncio.Semaphore(_MAX_HELD)

    async def run(self, tally: Tally) -> None:
        """Returns when every line has its result. Raises BatchError if the shards are lost."""
        window = WINDOW * self._services.config.batch_rows
        await gather_or_cancel(self._work(tally) for _ in range(window))

    async def _work(self, tally: Tally) -> None:
        for place, line in self._lines:
            await self._room.acquire()
            self._held[place] = await self._answer(line, tally)
            while (result := self._held.pop(self._num_written, None)) is not None:
                self._results.append(result)
                self._num_written += 1
                self._room.release()

    async def _answer(self, line: bytes, tally: Tally) -> bytes:
        """The result of one line. Raises BatchError if the shards are lost."""
        status_code = 400
        try:
            custom_id, url, body = read_request(line)
            if custom_id in self._custom_ids:
                raise LineError(
                    "duplicate_custom_id",
                    "`custom_id` is the same as that of an earlier line; give each line its own",
                    custom_id,
                )
            self._custom_ids.add(custom_id)
            status_code, answer = await post(self._app, url, body)
            result = response_line(custom_id, status_code, answer)
        except LineError as error:
            result = error_line(error)
        if status_code == 200:
            tally.tokens += _num_tokens(answer)
        elif status_code >= 500 and not await self._services.batcher.probe():
            raise BatchError("the shards do not answer any more; run the batch again to continue")
        tally.failed += status_code != 200
        tally.done += 1
        return result


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """The application's status code and answer to a POST of JSON. The client never disconnects."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status_code = 500
    pieces: list[bytes] = []

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Message) -> None:
        nonlocal status_code
        status_code = message.get("status", status_code)
        pieces.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": ("localhost", 80),
    }
    try:
        await app(scope, receive, send)
    except Exception:
        logger.exception("A request failed; this is a bug in the router")
        return 500, b'{"error":{"message":"The server failed on this request"}}'
    return status_code, b"".join(pieces)


def _num_tokens(body: bytes) -> int:
    """The number of generated tokens in an answer."""
    usage = orjson.loads(body).get("usage") or {}
    num = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return num if isinstance(num, int) else 0


def main(arguments: list[str] | None = None) -> int:
    """Answers the file; an error that the user can fix is one ERROR line and exit code 1."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    add_flags(parser, RouterConfig)
    options = vars(parser.parse_args(arguments))
    source, target = options.pop("input"), options.pop("output")
    formatter = LineFormatter(options["json_output"])
    send_to_output(options["logger_level"], formatter, "text_generation_router")
    if not logger.isEnabledFor(logging.DEBUG):
        # It would log a line for each request; the result has the same information.
        logging.getLogger("text_generation_router.infer").setLevel(logging.CRITICAL)
    try:
        config = RouterConfig(**options)
        rows = {"max_batch_size": config.batch_rows, "max_concurrent_requests": _NO_LIMIT}
        return uvloop.run(_run(RouterConfig(**(options | rows)), source, target))
    except asyncio.CancelledError:
        logger.info("Interrupted: run the batch again to continue")
    except (StartError, BatchError, ValueError, OSError) as error:
        logger.error("%s", error)
    return 1


async def _run(config: RouterConfig, source: Path, target: Path) -> int:
    """Answers the requests that have no result yet; the exit code."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with closing(ResultsFile(target)) as results:
        total, num_there = results.check_same(source), len(results.custom_ids)
        tally = Tally(total, done=num_there, failed=results.num_failed)
        if num_there:
            logger.info("%s has %d of %d results: continuing after them", target, num_there, total)
        if num_there < total:
            async with start(config) as services:
                tally.started = time.perf_counter()
                app = create_app(config, services)
                async with app.router.lifespan_context(app), _shown(tally):
                    await Batch(app, services, source, results).run(tally)
    logger.info(
        "%d requests: %d answered, %d failed; %d tokens in %.0f s; results in %s",
        total,
        total - tally.failed,
        tally.failed,
        tally.tokens,
        time.perf_counter() - tally.started,
        target,
    )
    return SOME_FAILED if tally.failed else 0


@asynccontextmanager
async def _shown(tally: Tally) -> AsyncIterator[None]:
    """Shows the progress during the block: a bar, or lines in the log."""

    async def log() -> None:
        while True:
            logger.info("%d of %d requests, %s", tally.done, tally.total, tally.rate)
            await asyncio.sleep(_LOG_EVERY_S)

    with bar(tally, sys.stderr) as is_drawn:
        logging_task = None if is_drawn else asyncio.create_task(log())
        try:
            yield
        finally:
            if logging_task is not None:
                logging_task.cancel()


if __name__ == "__main__":
    sys.exit(main())
