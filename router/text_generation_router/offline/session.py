"""The router's part of an `LLM`: its own event loop in its own thread, and what runs there."""

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

from text_generation_router.config import RouterConfig
from text_generation_router.services import Services, StartError, start

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Who fails is told by the results; whoever configures logging is told here as well.
logging.getLogger("text_generation_router.infer").addHandler(logging.NullHandler())


class Session:
    """Owns a thread with an event loop in which the services of one model run until `close`.

    So it makes no difference whether the caller has a loop of its own, as notebooks have.
    """

    def __init__(self, config: RouterConfig) -> None:
        """Connects and warms the shards up. Raises StartError."""
        self._started: Future[Services] = Future()
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(_ignore_other_loops)
        self._serving: asyncio.Task[None] | None = None
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._run, args=(config,), name="text-generation", daemon=True
        )
        self._thread.start()
        try:
            self.services = self._started.result()
        except BaseException:
            self.close()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Starts work in the loop. What still runs there when it is closed is cancelled."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Ends what runs and then the thread. May be repeated, but not from that thread."""
        with suppress(RuntimeError):  # the loop is closed: nothing runs any more
            self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join()

    def _cancel(self) -> None:
        self._is_closing = True
        if self._serving is not None:
            self._serving.cancel()

    def _run(self, config: RouterConfig) -> None:
        try:
            self._run_loop(config)
        except RuntimeError as error:
            # When the interpreter ends, the runner waits for the loop's other threads by a new one,
            # which Python 3.12 and newer refuse. They have ended before, and the loop is closed.
            if "interpreter shutdown" not in str(error):
                raise

    def _run_loop(self, config: RouterConfig) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve(config))
            except asyncio.CancelledError:
                if not self._started.done():
                    self._started.set_exception(StartError("closed while it was starting"))
            except BaseException as error:
                if self._started.done():
                    logger.exception("The scheduler has failed; this is a bug in pytgi")
                else:
                    self._started.set_exception(error)

    async def _serve(self, config: RouterConfig) -> None:
        """Runs until it is cancelled."""
        self._serving = asyncio.current_task()
        if self._is_closing:
            raise asyncio.CancelledError
        async with start(config) as services:
            batcher = asyncio.create_task(services.batcher.run(), name="batcher")
            self._started.set_result(services)
            try:
                await asyncio.Event().wait()
            finally:
                await services.batcher.close()
                await asyncio.gather(batcher, return_exceptions=True)


def _ignore_other_loops(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Reports what failed, but for a known noise: every loop that uses gRPC wakes up for every
    event and reads the same socket, and finds it empty where the event was another loop's."""
    handle = repr(context.get("handle", "")) + str(context.get("message", ""))
    is_noise = isinstance(context.get("exception"), BlockingIOError)
    if not (is_noise and "PollerCompletionQueue" in handle):
        loop.default_exception_handler(context)
