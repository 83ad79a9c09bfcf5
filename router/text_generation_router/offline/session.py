"""The router's part of an `LLM`, in an event loop in a thread of its own."""

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

# The results have the errors: they are logged only if the user configures logging.
logging.getLogger("text_generation_router.infer").addHandler(logging.NullHandler())


class Session:
    """Owns a thread with an event loop that runs the services of one model until `close`.

    The caller may have an event loop of its own, as notebooks do.
    """

    def __init__(self, config: RouterConfig) -> None:
        """Connects to the shards and warms them up. Raises StartError."""
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
        """Starts work in the loop; `close` cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancels all work and ends the thread. Idempotent; not to be called in that thread."""
        with suppress(RuntimeError):  # the loop is closed already
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
            # At the interpreter's exit the runner starts a thread to wait for the loop's executor,
            # which Python 3.12 and newer refuse. The loop is closed by then.
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
        """Runs the services until it is cancelled."""
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
    """Reports errors except a harmless one: an event of gRPC wakes up every loop that uses gRPC,
    and all but one find its socket empty."""
    handle = repr(context.get("handle", "")) + str(context.get("message", ""))
    is_noise = isinstance(context.get("exception"), BlockingIOError)
    if not (is_noise and "PollerCompletionQueue" in handle):
        loop.default_exception_handler(context)
