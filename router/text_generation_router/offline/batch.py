"""Answers a file of requests with the routes of the server, without a port."""

import asyncio
import logging
from collections import deque
from itertools import islice
from pathlib import Path

import orjson
from starlette.types import ASGIApp

from text_generation_router.offline.asgi import Answer, post
from text_generation_router.offline.batch_file import (
    LineError,
    ResultsFile,
    error_line,
    read_lines,
    read_request,
    response_line,
)
from text_generation_router.offline.progress import Tally
from text_generation_router.services import Services

logger = logging.getLogger(__name__)

# Requests in flight per row of the batch, so that a free row never waits for the next one.
_WINDOW = 2
# Results that wait for an earlier one, so that a long answer does not block the next requests.
_MAX_HELD = 16_384


class ShardsLostError(Exception):
    """The shards do not answer any more; another run can continue."""

    def __init__(self) -> None:
        super().__init__("the shards do not answer any more; run the batch again to continue")


class Batch:
    """Answers the requests of a file that have no result yet, and appends the results in order.

    A bad line becomes an error result. If `run` is cancelled or fails, results that are not written
    are lost.
    """

    def __init__(
        self, app: ASGIApp, services: Services, source: Path, results: ResultsFile
    ) -> None:
        """The app's lifespan must be running."""
        self._app = app
        self._services = services
        self._source = source
        self._results = results
        self._custom_ids = set(results.custom_ids)
        # In the order of the input, from the first one without a result.
        self._held: deque[asyncio.Task[bytes]] = deque()
        self._running: set[asyncio.Task[bytes]] = set()

    async def run(self, tally: Tally) -> None:
        """Returns when every line has its result. Raises ShardsLostError."""
        window = _WINDOW * self._services.config.batch_rows
        lines = islice(read_lines(self._source), len(self._results.custom_ids), None)
        try:
            for line in lines:
                task = asyncio.create_task(self._answer(line, tally))
                self._held.append(task)
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                while len(self._running) >= window or len(self._held) >= _MAX_HELD:
                    await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                    self._write_ready()
            while self._held:
                await asyncio.wait({self._held[0]})
                self._write_ready()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._held, return_exceptions=True)

    def _write_ready(self) -> None:
        """Appends the results that are next in order."""
        while self._held and self._held[0].done():
            self._results.append(self._held.popleft().result())

    async def _answer(self, line: bytes, tally: Tally) -> bytes:
        """The result of one line. Raises ShardsLostError."""
        try:
            request = read_request(line)
            if request.custom_id in self._custom_ids:
                raise LineError(
                    "duplicate_custom_id",
                    "`custom_id` is the same as that of an earlier line; give each line its own",
                    request.custom_id,
                )
            self._custom_ids.add(request.custom_id)
            answer = await self._post(request.url, request.body)
            is_answer = answer.status_code == 200
            if not is_answer and answer.status_code >= 500:
                await self._check_shards()
            tally.tokens += _num_tokens(answer)
            result = response_line(request.custom_id, answer.status_code, answer.body)
        except LineError as error:
            is_answer, result = False, error_line(error)
        tally.failed += not is_answer
        tally.done += 1
        return result

    async def _post(self, url: str, body: bytes) -> Answer:
        try:
            return await post(self._app, url, body)
        except Exception:
            logger.exception("A request failed; this is a bug in the router")
            message = b'{"error":{"message":"The server failed on this request"}}'
            return Answer(500, message)

    async def _check_shards(self) -> None:
        """Raises ShardsLostError if a request failed because the shards do not answer."""
        if not await self._services.batcher.probe():
            raise ShardsLostError


def _num_tokens(answer: Answer) -> int:
    """The number of generated tokens."""
    if answer.status_code != 200:
        return 0
    usage = orjson.loads(answer.body).get("usage") or {}
    num = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return num if isinstance(num, int) else 0
